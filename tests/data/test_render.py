import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gemsmith.data.dataset import Document
from gemsmith.data.tokenize import (
    EMPTY_THOUGHT,
    Renderer,
    open_renderer,
    open_tokenizer,
    render_documents,
    split_document,
)
from gemsmith.errors import CheckpointError, DataError
from gemsmith.tasks.messages import plain_messages, text_of
from support.cases import each

GOLDEN = Path(__file__).parent / "golden" / "system_and_two_turns.json"
TALK = ("system=be brief", "user=a or b?", "assistant=b", "user=why", "assistant=so\n  it is")

# Like the larger variants' own: an empty thought channel in the generation prompt and nowhere else.
CHANNEL_IN_PROMPT = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content "
    "}}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n<|channel>thought\n<channel|>{% endif %}"
)
CHANNEL_IN_HISTORY = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|turn>model\n<|channel>thought\n<channel|>{{ "
    "m.content }}"
    "{% else %}<|turn>{{ m.role }}\n{{ m.content }}{% endif %}<turn|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|turn>model\n{% endif %}"
)


def with_template(folder: Path, text: str) -> Renderer:
    (folder / "chat_template.jinja").write_text(text)
    return open_renderer(folder)


def decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def trained_runs(rendered, tokenizer) -> list[str]:
    """The text of each unbroken run of trained tokens."""
    borders = np.flatnonzero(np.diff(rendered.trained.astype(int), prepend=0, append=0))
    return [decode(tokenizer, rendered.ids[begin:end]) for begin, end in borders.reshape(-1, 2)]


def refused(renderer: Renderer, document: Document) -> str:
    with pytest.raises(DataError) as error:
        list(render_documents(renderer, [document]))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("rows.jsonl line 1: ")
    return str(error.value)


def test_one_turn_has_the_ids_and_the_mask_worked_out_by_hand(renderer, document):
    [rendered] = render_documents(renderer, [document("user=add b", "assistant=wire b")])
    #           <bos> <|turn> user \n   a    d    d    ▁    b  <turn|> \n <|turn> model \n wire   ▁    b  <turn|> \n
    assert rendered.ids.tolist() == [
        2,
        105,
        393,
        107,
        364,
        367,
        367,
        390,
        365,
        106,
        107,
        105,
        397,
        107,
        405,
        390,
        365,
        106,
        107,
    ]
    assert rendered.trained.astype(int).tolist() == [0] * 14 + [1, 1, 1, 1] + [0]
    assert rendered.ids.dtype == np.int32


def test_a_system_turn_and_two_answers_are_as_in_the_golden_file(renderer, document):
    [rendered] = render_documents(renderer, [document(*TALK)])
    golden = json.loads(GOLDEN.read_text())
    assert rendered.ids.tolist() == golden["ids"]
    assert rendered.trained.astype(int).tolist() == golden["trained"]
    assert decode(renderer.tokenizer, rendered.ids) == golden["text"]


def test_each_answer_is_trained_once_and_nothing_else_is(renderer, document):
    [rendered] = render_documents(renderer, [document(*TALK)])
    assert trained_runs(rendered, renderer.tokenizer) == ["b<turn|>", "so\n  it is<turn|>"]


def test_the_ids_spell_the_full_render(renderer, document):
    chat_loop = document(*TALK)
    [rendered] = render_documents(renderer, [chat_loop])
    assert decode(renderer.tokenizer, rendered.ids) == renderer.template.render(plain_messages(chat_loop.messages))


def test_white_space_around_an_answer_is_the_templates_affair(renderer, document):
    [rendered] = render_documents(renderer, [document("user=a", "assistant=  b \n")])
    assert trained_runs(rendered, renderer.tokenizer) == ["b<turn|>"]


def test_a_user_turn_after_the_last_answer_is_not_trained(renderer, document):
    [rendered] = render_documents(renderer, [document("user=a", "assistant=b", "user=c")])
    assert trained_runs(rendered, renderer.tokenizer) == ["b<turn|>"]


def test_prompt_and_answer_are_tokenised_apart_where_a_token_would_span_the_border(tokenizer_folder, document):
    file = tokenizer_folder / "tokenizer.json"
    values = json.loads(file.read_text())
    del values["model"]["vocab"]["<unused5>"]
    values["model"]["vocab"]["\nb"] = 5
    values["model"]["merges"].insert(0, ["\n", "b"])
    file.write_text(json.dumps(values))
    renderer = open_renderer(tokenizer_folder)
    assert renderer.tokenizer.encode("\nb", add_special_tokens=False).ids == [5]
    [rendered] = render_documents(renderer, [document("user=a", "assistant=b")])
    #                                                                         \n   b  <turn|> \n
    assert rendered.ids.tolist() == [2, 105, 393, 107, 364, 106, 107, 105, 397, 107, 365, 106, 107]
    assert np.flatnonzero(rendered.trained).tolist() == [10, 11]


def test_many_documents_come_in_order_and_as_they_come_alone(renderer, document):
    documents = [document(f"user=add {number}", f"assistant=wire {number % 7}") for number in range(2500)]
    together = list(render_documents(renderer, documents))
    assert len(together) == 2500
    for number in (0, 1023, 1024, 2499):
        [alone] = render_documents(renderer, [documents[number]])
        assert np.array_equal(alone.ids, together[number].ids) and np.array_equal(
            alone.trained, together[number].trained
        )


def test_a_channel_in_the_generation_prompt_alone_is_put_in_and_not_trained(tokenizer_folder, document):
    renderer = with_template(tokenizer_folder, CHANNEL_IN_PROMPT)
    asked = document("user=a", "assistant=b")
    [rendered] = render_documents(renderer, [asked])
    prompt = renderer.template.render(plain_messages(asked.messages[:1]), generation_prompt=True)
    assert decode(renderer.tokenizer, rendered.ids) == prompt + "b<turn|>\n"
    assert trained_runs(rendered, renderer.tokenizer) == ["b<turn|>"]


def test_with_such_a_channel_each_answer_gets_a_sequence_that_is_what_serving_would_show(tokenizer_folder, document):
    renderer = with_template(tokenizer_folder, CHANNEL_IN_PROMPT)
    chat_loop = document(*TALK)
    sequences = list(render_documents(renderer, [chat_loop]))
    for rendered, index in zip(sequences, (2, 4), strict=True):
        begin = int(np.flatnonzero(rendered.trained)[0])
        assert decode(renderer.tokenizer, rendered.ids[:begin]) == renderer.template.render(
            plain_messages(chat_loop.messages[:index]), generation_prompt=True
        )
        assert trained_runs(rendered, renderer.tokenizer) == [text_of(chat_loop.messages[index]) + "<turn|>"]


def test_a_channel_in_the_history_alone_stays_and_is_not_trained(tokenizer_folder, document):
    renderer = with_template(tokenizer_folder, CHANNEL_IN_HISTORY)
    chat_loop = document(*TALK)
    [rendered] = render_documents(renderer, [chat_loop])
    assert decode(renderer.tokenizer, rendered.ids) == renderer.template.render(plain_messages(chat_loop.messages))
    assert trained_runs(rendered, renderer.tokenizer) == ["b<turn|>", "so\n  it is<turn|>"]


def test_a_channel_that_the_answer_itself_holds_is_trained(renderer, document):
    [rendered] = render_documents(renderer, [document("user=a", f"assistant={EMPTY_THOUGHT}b")])
    assert trained_runs(rendered, renderer.tokenizer) == [f"{EMPTY_THOUGHT}b<turn|>"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "'<|turn>model\\n' -}}\n{%- endif",
            "'<|turn>modell\\n' -}}\n{%- endif",
            "messages[1]: the chat template's generation prompt",
        ),
        ("'<turn|>\\n'", "'<|turn>\\n'", "messages[1]: the chat template does not end the answer with <turn|>"),
        (
            "message.content | trim",
            "message.content | upper",
            "messages[1]: the chat template changes the answer 'b' to 'B'",
        ),
        ("'<turn|>\\n'", "messages | length ~ '<turn|>\\n'", "messages[1]: the chat template's generation prompt"),
        ("bos_token", "''", "the chat template does not write <bos> once"),
        ("('system', 'user', 'assistant')", "('system', 'assistant')", "refuses it: role user is not known"),
    ],
)
def test_a_template_that_leaves_the_mask_in_doubt_is_refused(old, new, message, tokenizer_folder, document):
    text = (tokenizer_folder / "chat_template.jinja").read_text()
    assert old in text
    assert message in refused(
        with_template(tokenizer_folder, text.replace(old, new)), document("user=a", "assistant=b")
    )


def test_a_template_that_changes_earlier_answers_is_refused(tokenizer_folder, document):
    text = (tokenizer_folder / "chat_template.jinja").read_text()
    changed = text.replace(
        "{{- message.content | trim -}}", "{{- message.content if loop.last or message.role != 'assistant' else '…' -}}"
    )
    assert changed != text
    assert "renders an earlier turn otherwise once later ones follow" in refused(
        with_template(tokenizer_folder, changed), document(*TALK)
    )


@each("role", ["user", "assistant"])
@each("token", ["<turn|>", "<|turn>", "<eos>", "<bos>", "<pad>", "<|image|>", "<|audio|>", "<|video|>"])
def test_control_tokens_in_content_are_refused(role, token, renderer, document):
    turns = {"user": "a", "assistant": "b"} | {role: f"x{token}y"}
    index = 0 if role == "user" else 1
    text = refused(renderer, document(*(f"{name}={content}" for name, content in turns.items())))
    assert f"messages[{index}] holds {token}, a control token" in text


def test_a_tokenizer_with_other_special_ids_is_refused(tokenizer_folder):
    file = tokenizer_folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"<turn|>"', '"<end_of_turn>"'))
    with pytest.raises(CheckpointError, match=r"<turn\|> is id None, Gemma 4's is 106"):
        open_tokenizer(tokenizer_folder)


def test_a_tokenizer_that_spells_out_the_turns_end_is_refused(tokenizer_folder):
    file = tokenizer_folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] != "<turn|>"]
    file.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"does not read <turn\|> in a text as one token"):
        open_tokenizer(tokenizer_folder)


def test_a_damaged_tokenizer_is_refused(tokenizer_folder):
    (tokenizer_folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        open_tokenizer(tokenizer_folder)


def published_templates() -> list[Path]:
    """Google's revisions of Gemma 4's chat template, which TRL ships."""
    import importlib.util

    trl = importlib.util.find_spec("trl")
    return sorted((Path(trl.origin).parent / "chat_templates").glob("gemma4*.jinja")) if trl and trl.origin else []


@pytest.mark.skipif(not published_templates(), reason="trl is not installed")
@pytest.mark.parametrize("file", published_templates(), ids=lambda file: file.stem)
def test_the_mask_is_right_with_each_published_revision_of_the_template(file, tokenizer_folder, document):
    renderer = with_template(tokenizer_folder, file.read_text())
    chat_loop = document(*TALK)
    [rendered] = render_documents(renderer, [chat_loop])
    assert decode(renderer.tokenizer, rendered.ids) == renderer.template.render(plain_messages(chat_loop.messages))
    assert trained_runs(rendered, renderer.tokenizer) == ["b<turn|>", "so\n  it is<turn|>"]
    assert "changes the answer" in refused(renderer, document("user=a", f"assistant={EMPTY_THOUGHT}b"))


@pytest.mark.skipif(not published_templates(), reason="trl is not installed")
@pytest.mark.parametrize("file", published_templates(), ids=lambda file: file.stem)
def test_two_answers_in_a_row_are_trained_or_refused_by_each_published_revision(file, tokenizer_folder, document):
    renderer = with_template(tokenizer_folder, file.read_text())
    twice = document("user=a", "assistant=b", "assistant=c")
    try:
        [rendered] = render_documents(renderer, [twice])
    except DataError as error:
        assert "let user and assistant take turns" in str(error)  # noqa: PT017 (either outcome is right)
    else:
        assert trained_runs(rendered, renderer.tokenizer) == ["b<turn|>", "c<turn|>"]


@pytest.mark.parametrize("file", [None, *published_templates()], ids=lambda file: file.stem if file else "tiny")
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_templates_render_as_in_transformers(file, generation_prompt, tokenizer_folder, document):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    renderer = with_template(tokenizer_folder, file.read_text()) if file else open_renderer(tokenizer_folder)
    chat_loop = plain_messages(document(*TALK).messages[:4])
    [[expected], _] = reference.render_jinja_template(
        [[dict(message) for message in chat_loop]],
        chat_template=(tokenizer_folder / "chat_template.jinja").read_text(),
        add_generation_prompt=generation_prompt,
        bos_token="<bos>",
    )
    assert renderer.template.render(chat_loop, generation_prompt=generation_prompt) == expected


def test_pieces_of_a_document_join_to_the_full_render(renderer, document):
    chat_loop = document(*TALK)
    [(pieces, _)] = split_document(renderer.template, chat_loop)
    assert "".join(piece.text for piece in pieces) == renderer.template.render(plain_messages(chat_loop.messages))
    assert [piece.trained for piece in pieces] == [False, True, False, True, False]
