"""Images in a conversation, typed in a terminal, uploaded to the page, and of held-out rows."""

import base64
import io
import shutil
from pathlib import Path

import gradio
import pytest

from gemsmith.errors import DataError
from gemsmith.images.check import to_data_url, validate_image
from gemsmith.images.patches import PatchConfig
from gemsmith.serve.chat.terminal import ChatSetup, ImageSupport, chat_loop, make_content, text_in, urls_in
from gemsmith.serve.chat.web import answer_all, attach, draw_turns, fill_in
from gemsmith.serve.client.stream import SamplingParams
from gemsmith.tasks.base import Question
from gemsmith.tasks.messages import ImagePart, Message, TextPart
from support.images import image_bytes

PATCHING = PatchConfig(budget=70, patch=4)
SIGHT = ImageSupport(patching=PATCHING)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    file = tmp_path / "a cat.png"
    file.write_bytes(image_bytes(96, 96, seed=5))
    return file


@pytest.fixture
def row(image: Path) -> Question:
    parts = (ImagePart(path=str(image)), TextPart(text="Which is it?"))
    seen = (validate_image(str(image), PATCHING),)
    return Question(messages=(Message(role="user", parts=parts),), expected="cat", origin="pets/a", images=seen)


@pytest.fixture
def say(monkeypatch, capsys, speaker):
    def said(*lines, **options):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat_loop(ChatSetup(voices=[speaker.voice()], title="", sampling=SamplingParams(), **options))
        return capsys.readouterr()

    return said


def test_a_image_goes_with_the_next_prompt_alone_and_is_remembered(say, speaker, image):
    _, err = say(f"/image {image}", f"/image {image}", "what?", "and now?", sight=SIGHT)
    assert "1 image goes with the next prompt" in err and "2 images go with the next prompt" in err
    first, second = (asked["messages"] for asked in speaker.asked)
    content = first[-1]["content"]
    assert urls_in(content) == [to_data_url(str(image), PATCHING)] * 2 and text_in(content) == "what?"
    assert second[0]["content"] == content and second[-1]["content"] == "and now?"


def test_a_file_that_is_no_image_is_said_and_the_conversation_goes_on(say, speaker, tmp_path):
    (tmp_path / "a.txt").write_text("no image")
    _, err = say("/image", "/image /nowhere", f"/image {tmp_path / 'a.txt'}", "hi", sight=SIGHT)
    assert err.count("/image: ") == 3 and "does not exist" in err and "is none of" in err
    assert [asked["messages"][-1]["content"] for asked in speaker.asked] == ["hi"]


def test_a_server_of_text_alone_is_not_sent_one(say, image):
    _, err = say(f"/image {image}", sight=ImageSupport(takes_images=False))
    assert "/image: the server takes text alone; start the chat with --set serve.images=true" in err


def test_a_new_conversation_forgets_a_image_that_waits(say, speaker, image):
    say(f"/image {image}", "/new", "hi", sight=SIGHT)
    assert speaker.asked[0]["messages"][-1]["content"] == "hi"


def test_a_held_out_row_is_asked_with_its_image(say, speaker, image, row):
    _, err = say("/row 1", rows=lambda: [row], sight=SIGHT)
    content = speaker.asked[0]["messages"][-1]["content"]
    assert urls_in(content) == [to_data_url(str(image), PATCHING)] and text_in(content) == "Which is it?"
    shown = " ".join(err.split())
    assert "96 × 96" in shown and "row 1: [image] Which is it?" in shown and "expected: cat" in shown
    image.write_bytes(image_bytes(seed=6))
    _, err = say("/row 1", rows=lambda: [row], sight=SIGHT)
    assert "/row: " in err and "has changed since" in " ".join(err.split())


def test_the_page_attaches_an_upload_and_shows_it(image):
    expected, again = to_data_url(str(image), PATCHING), shutil.copy(image, image.with_name("again.png"))
    urls, drawn = attach(str(image), [], SIGHT)
    assert not image.exists() and urls == [expected] and drawn.startswith('<img src="data:image/png;base64,')
    assert len(attach(str(again), urls, SIGHT)[0]) == 2
    with pytest.raises(gradio.Error, match="does not exist"):
        attach("/nowhere", [], SIGHT)


def test_the_page_fills_in_a_rows_image_and_sends_it(speaker, image, row):
    voices = [speaker.voice()]
    text, _, expected, urls, preview, said, *_ = fill_in([row], 0, voices, SIGHT)
    assert (text, expected, said) == ("Which is it?", "cat", [[]]) and "<img" in preview
    sent, *_, last = answer_all(voices, text, urls, said, "", SamplingParams())
    assert sent[1:4] == ("", [], "") and last[1:4] == (gradio.skip(),) * 3
    remembered, drawn = last[0], last[4]
    assert drawn.count("<img") == 1
    assert urls_in(speaker.asked[0]["messages"][0]["content"]) == urls
    assert [turn["role"] for turn in remembered[0]] == ["user", "assistant"]
    image.write_bytes(b"")
    with pytest.raises(gradio.Error, match="has changed"):
        fill_in([row], 0, voices, SIGHT)


def test_what_a_user_writes_beside_a_image_is_never_a_tag(speaker):
    url = "data:image/png;base64," + base64.b64encode(b"x").decode()
    drawn = draw_turns(speaker.voice(), [{"role": "user", "content": make_content("<b>", [url, '"><script>'])}])
    assert "&lt;b&gt;" in drawn and "<script>" not in drawn and drawn.count("<img") == 2


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"^/nowhere/a.png: does not exist"):
        SIGHT.look("/nowhere/a.png")
