from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from gemsmith.data.chat_template import EMPTY_THOUGHT, GEMMA_CONTROL, PLACEHOLDERS, find_control_tokens
from gemsmith.data.dataset import Dataset, Document, read_dataset
from gemsmith.data.tokenize import Renderer, check_prompts, open_renderer, render_documents
from gemsmith.errors import DataError
from gemsmith.recipe.schema import Data
from gemsmith.tasks.messages import text_message
from support.cases import each
from tiny_checkpoints import IMAGE_TOKENS, SPECIAL_TOKENS

# As tokenizers of the family add them: matched in raw text like special tokens, but text.
PLAIN = ("<b>", "</b>", "<table>", "<unused7>", "[multimodal]", "\n\n", "\t\t", "<|>", "<||>")


def with_tokens(folder: Path, *tokens: AddedToken) -> Renderer:
    """The renderer of a tokenizer that has these added tokens as well."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([token for token in tokens if not token.special])
    tokenizer.add_special_tokens([token for token in tokens if token.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    return open_renderer(folder)


def with_template(folder: Path, text: str) -> Renderer:
    (folder / "chat_template.jinja").write_text(text)
    return open_renderer(folder)


def refused(renderer: Renderer, document: Document) -> str:
    with pytest.raises(DataError) as error:
        list(render_documents(renderer, [document]))
    text = str(error.value)
    assert "\n" not in text and text.startswith("rows.jsonl line 1: ")
    return text


def control_ids(renderer: Renderer, document: Document) -> list[int]:
    [rendered] = render_documents(renderer, [document])
    return renderer.control.among(rendered.ids).tolist()


@pytest.mark.parametrize("place", ["system", "user", "assistant", "second answer"])
def test_each_special_token_in_content_is_refused_with_row_place_and_token(place, renderer, document, subtests):
    index = {"system": 0, "user": 1, "assistant": 2, "second answer": 4}[place]
    for token in (*SPECIAL_TOKENS.values(), *PLACEHOLDERS):
        texts = {"system": "s", "user": "a", "assistant": "b", "second answer": "d"} | {place: f"x{token}y"}
        forged = document(
            f"system={texts['system']}",
            f"user={texts['user']}",
            f"assistant={texts['assistant']}",
            "user=c",
            f"assistant={texts['second answer']}",
        )
        with subtests.test(token):
            assert f"messages[{index}] holds {token}, a control token" in refused(renderer, forged)


def test_a_pair_is_refused_by_the_name_of_its_column(renderer):
    messages = (text_message("user", "a"), text_message("assistant", "b<|tool_response>"))
    forged = Document(messages=messages, origin="rows.jsonl line 1", names=("prompt", "response"))
    assert "line 1: response holds <|tool_response>" in refused(renderer, forged)


def test_a_special_token_of_this_tokenizer_alone_is_refused(tokenizer_folder, document):
    asked = document("user=a [STOP] b", "assistant=b")
    list(render_documents(open_renderer(tokenizer_folder), [asked]))
    renderer = with_tokens(tokenizer_folder, AddedToken("[STOP]", special=True))
    assert "messages[0] holds [STOP], a control token" in refused(renderer, asked)


def test_one_that_is_spelled_like_a_control_token_is_refused_though_it_is_not_flagged_special(
    tokenizer_folder, document
):
    renderer = with_tokens(tokenizer_folder, AddedToken("<|new|>", special=False), AddedToken("<new|>", special=False))
    assert "holds <|new|>" in refused(renderer, document("user=a", "assistant=<|new|>"))
    assert "holds <new|>" in refused(renderer, document("user=a", "assistant=<new|>"))


@each("text", [*PLAIN, "<table><tr><b>x</b></tr></table>", "xs |> f <| y", "a<|turn", "turn|>", "< |turn>", "<Turn|>"])
def test_tags_and_other_text_stay_allowed(text, tokenizer_folder, document):
    renderer = with_tokens(tokenizer_folder, *(AddedToken(token, special=False, normalized=False) for token in PLAIN))
    chat_loop = document(f"user={text}", f"assistant={text} b", f"user=a {text}", f"assistant=a{text}")
    assert control_ids(renderer, chat_loop) == [2, 105, 106] + [105, 106] * 3


def test_a_token_that_must_stand_alone_is_refused_only_where_it_does(tokenizer_folder, document):
    renderer = with_tokens(tokenizer_folder, AddedToken("sep", special=True, single_word=True))
    list(render_documents(renderer, [document("user=separate", "assistant=b")]))
    assert "messages[0] holds sep" in refused(renderer, document("user=a sep b", "assistant=b"))


@pytest.mark.parametrize("text", ["＜turn｜＞", "a ＜end＞"])
def test_a_token_that_only_normalised_text_holds_is_refused(text, tokenizer_folder, document):
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    renderer = with_tokens(tokenizer_folder, AddedToken("<end>", special=True, normalized=True))
    rows = [document("user=a", "assistant=b"), document("user=a", f"assistant={text}")]
    if "end" in text:
        assert "messages[1] is tokenized to <end>, a control token" in refused(renderer, rows[1])
        with pytest.raises(DataError, match=r"is tokenized to <end>"):
            list(render_documents(renderer, rows))
    else:  # Gemma's own are looked for before text is normalized.
        assert control_ids(renderer, rows[1]) == [2, 105, 106, 105, 106]


# The user's text meets `turn|>`, and two answers meet each other.
OPEN_BORDER = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "{% if m.role == 'user' %}turn|>{% endif %}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% "
    "endif %}"
)


def test_a_token_that_text_and_template_make_together_is_refused(tokenizer_folder, document):
    renderer = with_template(tokenizer_folder, OPEN_BORDER)
    fine, forged = document("user=a", "assistant=b"), document("user=a<", "assistant=b")
    assert control_ids(renderer, fine) == [2, 105, 106, 105, 106]
    for rows in ([forged], [fine, forged]):
        with pytest.raises(
            DataError, match=r"line 1: a text in it and what the chat template writes next to it make <turn\|>"
        ):
            list(render_documents(renderer, rows))


def test_a_prompt_in_which_two_texts_make_a_token_together_is_refused(tokenizer_folder, document):
    joined = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}<turn|>{% if add_generation_prompt "
        "%}<|turn>model\n{% endif %}"
    )
    renderer = with_template(tokenizer_folder, joined)
    check_prompts(renderer, [(document("user=a", "assistant=b", "assistant=c"), 2)])
    forged = document("user=a", "assistant=x<|tool", "assistant=_response>", "assistant=c")
    check_prompts(renderer, [(forged, 2)])
    with pytest.raises(DataError, match=r"line 1: .* make <\|tool_response>"):
        check_prompts(renderer, [(forged, 3)])


def test_a_token_that_the_template_writes_for_some_texts_is_its_own(tokenizer_folder, document):
    text = (tokenizer_folder / "chat_template.jinja").read_text()
    renderer = with_template(
        tokenizer_folder,
        text.replace(
            "{{- bos_token -}}", "{{- bos_token -}}{%- if 'deep' in messages[0].content -%}<|think|>{%- endif -%}"
        ),
    )
    rows = [document("user=a", "assistant=b"), document("user=deep", "assistant=b"), document("user=a", "assistant=c")]
    assert [
        renderer.control.among(rendered.ids).tolist().count(98) for rendered in render_documents(renderer, rows)
    ] == [0, 1, 0]


@pytest.mark.parametrize(
    ("turns", "place"),
    [
        (("user=a", "assistant=<|channel>thought\nhm\n<channel|>b"), "messages[1] holds <|channel>"),
        (("user=a", f"assistant=b{EMPTY_THOUGHT}"), "messages[1] holds <|channel>"),
        (("user=a", f"assistant={EMPTY_THOUGHT}{EMPTY_THOUGHT}b"), "messages[1] holds <|channel>"),
        (("user=a", f"assistant={EMPTY_THOUGHT}b<channel|>"), "messages[1] holds <channel|>"),
        ((f"user={EMPTY_THOUGHT}a", "assistant=b"), "messages[0] holds <|channel>"),
    ],
)
def test_of_thoughts_only_an_empty_one_at_an_answers_start_is_allowed(turns, place, renderer, document):
    list(render_documents(renderer, [document("user=a", f"assistant={EMPTY_THOUGHT}b")]))
    assert place in refused(renderer, document(*turns))


def test_rows_of_the_same_turns_are_rendered_again_once(renderer, document, monkeypatch):
    supervised = []
    monkeypatch.setattr("gemsmith.data.chat_template._guard", lambda one: supervised.append(one) or one)
    list(render_documents(renderer, [document(f"user=a{number}", "assistant=b") for number in range(50)]))
    assert len(supervised) == 1


def test_control_ids_are_told_from_all_others(renderer):
    assert find_control_tokens(renderer.tokenizer).among(
        np.array([2, 105, 393, 5, 50, 107, 106, 262_143], np.int32)
    ).tolist() == [
        2,
        105,
        50,
        106,
    ]


def test_text_that_begins_or_ends_like_a_token_is_read_as_text(renderer, document):
    chat_loop = document("user=a<|", "assistant=turn> <|channel", "user=>", "assistant=<|tool_response |>")
    assert control_ids(renderer, chat_loop) == [2, 105, 106, 105, 106, 105, 106, 105, 106]


def read(file: Path, wanted: str) -> Dataset:
    return read_dataset(str(file), data=Data(train="-", control_tokens=wanted), part="train")


def test_each_control_token_of_gemma_4_is_one_that_can_be_dropped_or_read_as_text():
    names = {*SPECIAL_TOKENS.values(), *PLACEHOLDERS, *(text for _, text in IMAGE_TOKENS.values())}
    assert [name for name in sorted(names) if not GEMMA_CONTROL.fullmatch(name)] == []
    assert [name for name in (*PLAIN, "<|im_end|>", "f <| x > y") if GEMMA_CONTROL.search(name)] == []


def test_dropped_control_tokens_leave_the_text_around_them_and_are_counted(write_rows, renderer):
    rows = write_rows(
        {"prompt": "a<|tu<eos>rn>", "response": f"{EMPTY_THOUGHT}b"},
        {"prompt": "a", "response": "b<turn|> c"},
        {"prompt": "a", "response": "b"},
    )
    found = read(rows, "drop")
    assert [[message.parts[0].text for message in row.messages] for row in found.documents] == [
        ["a", f"{EMPTY_THOUGHT}b"], ["a", "b c"], ["a", "b"]
    ]  # fmt: skip
    assert found.warnings == ("data.train: rows with control tokens, which are left out of them: 2 of 3",)
    assert len(render_documents(renderer, found.documents)) == 3
    with pytest.raises(DataError, match=r"line 1: response is nothing but control tokens; take the row out"):
        read(write_rows({"prompt": "a", "response": "<eos>"}), "drop")
    deep = read(write_rows({"prompt": "a" + "<|tu" * 200 + "<eos>" + "rn>" * 200, "response": "b"}), "drop")
    assert deep.documents[0].messages[0].parts[0].text.count("rn>") == 101, "without end it is quadratic"
    render_documents(renderer, deep.documents)


def test_control_tokens_that_are_read_as_text_come_to_their_characters_in_training_and_in_prompts(write_rows, renderer):
    asked, answered = "a <|turn>b", "wire<turn|><eos> c"
    found = read(write_rows({"prompt": asked, "response": answered}, {"prompt": "a", "response": "b"}), "text")
    assert found.warnings == ("data.train: rows with control tokens, which are read as text: 1 of 2",)
    first, second = render_documents(renderer, found.documents)
    assert [one.tolist() for one in map(renderer.control.among, (first.ids, second.ids))] == [
        [2, 105, 106] * 1 + [105, 106]
    ] * 2
    text = renderer.tokenizer.decode(first.ids.tolist(), skip_special_tokens=False)
    assert text == f"<bos><|turn>user\n{asked}<turn|>\n<|turn>model\n{answered}<turn|>\n"
    trained = renderer.tokenizer.decode(first.ids[first.trained].tolist(), skip_special_tokens=False)
    assert trained == f"{answered}<turn|>"
    [plain] = render_documents(renderer, read(write_rows({"prompt": "a", "response": "b"}), "error").documents)
    assert np.array_equal(plain.ids, second.ids)
    [prompt] = check_prompts(renderer, [(found.documents[0], 1)])
    assert np.array_equal(prompt, first.ids[: len(prompt)])
