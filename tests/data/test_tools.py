"""Tool calls, their results and reasoning, as Google's published templates render them, and what of each is trained."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from gemsmith.data.chat_template import find_template
from gemsmith.data.dataset import read_dataset, read_prompts
from gemsmith.data.dedup import hash_turns
from gemsmith.data.tokenize import Renderer, check_prompts, open_renderer, render_documents
from gemsmith.errors import DataError
from gemsmith.recipe.schema import Data
from support.cases import each

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a day.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
ASK = {"role": "user", "content": "rain in Ulm?"}


def call(number: str, **arguments: object) -> dict[str, object]:
    return {"type": "function", "id": number, "function": {"name": "weather", "arguments": arguments}}


def calls(*given: dict[str, object], **beside: object) -> dict[str, object]:
    return {"role": "assistant", "content": "", "tool_calls": [*given], **beside}


def result(number: str, content: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": number, "content": content}


def answer(content: str, **beside: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **beside}


ULM, BONN = call("a", city="Ulm", days=[1, 2], wet=True), call("b", city="Bonn", unit="C")
ULM_TEXT = '<|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:[1,2],wet:true}<tool_call|>'
BONN_TEXT = '<|tool_call>call:weather{city:<|"|>Bonn<|"|>,unit:<|"|>C<|"|>}<tool_call|>'
END = "<|tool_response>"
ROWS = {
    "one call": ([ASK, calls(ULM)], [ULM_TEXT + END]),
    "a result": ([ASK, calls(ULM), result("a", "wet"), answer("yes")], [ULM_TEXT + END, "yes<turn|>"]),
    "two calls": (
        [{"role": "system", "content": "be brief"}, ASK, calls(ULM, BONN), result("a", "wet"), result("b", "dry"),
         answer("one"), {"role": "user", "content": "thanks"}, answer("ok")],
        [ULM_TEXT + BONN_TEXT + END, "one<turn|>", "ok<turn|>"],
    ),
    "one after the other": (
        [ASK, calls(ULM), result("a", "wet"), calls(BONN), result("b", "dry"), answer("one")],
        [ULM_TEXT + END, BONN_TEXT + END, "one<turn|>"],
    ),
    "reasoning": (
        [ASK, calls(ULM, reasoning="look it up"), result("a", "wet"), answer("yes")],
        ["<|channel>thought\nlook it up\n<channel|>" + ULM_TEXT + END, "yes<turn|>"],
    ),
}  # fmt: skip


def published_templates() -> list[Path]:
    """Google's revisions of Gemma 4's template that know the role tool; the first, of the release, did not."""
    trl = importlib.util.find_spec("trl")
    found = sorted((Path(trl.origin).parent / "chat_templates").glob("gemma4*.jinja")) if trl and trl.origin else []
    return [file for file in found if file.stem != "gemma4_v2"]


TEMPLATES = published_templates()
each_template = pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="trl is not installed")
NEWEST = max(TEMPLATES, default=Path())


@pytest.fixture
def open_with(tokenizer_folder):
    """Returns the renderer of a template's file."""

    def open_(file: Path = NEWEST, **data: object) -> Renderer:
        (tokenizer_folder / "chat_template.jinja").write_text(file.read_text())
        return open_renderer(tokenizer_folder, find_template(tokenizer_folder, Data(train="-", **data)))

    return open_


@pytest.fixture
def read(write_rows):
    """Returns the document of a row."""

    def read_(messages: list[dict[str, object]], **columns: object):
        [document] = read_dataset(str(write_rows({"messages": messages, **columns}))).documents
        return document

    return read_


def trained_runs(rendered, renderer) -> list[str]:
    borders = np.flatnonzero(np.diff(rendered.trained.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [
        renderer.tokenizer.decode(rendered.ids[begin:end].tolist(), skip_special_tokens=False) for begin, end in borders
    ]


def text_of_ids(rendered, renderer) -> str:
    return renderer.tokenizer.decode(rendered.ids.tolist(), skip_special_tokens=False)


def as_transformers(file: Path, messages: list[dict[str, object]], tools: object = None, **options: object) -> str:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    [[text], _] = reference.render_jinja_template(
        [messages], tools=tools, chat_template=file.read_text(), bos_token="<bos>", **options
    )
    return text


@each_template
@each("tools", [None, [WEATHER]], ids=["undeclared", "declared"])
@each("name", [*ROWS])
def test_rows_render_as_in_transformers_and_what_the_model_writes_is_trained(file, tools, name, open_with, read):
    messages, trained = ROWS[name]
    renderer = open_with(file)
    document = read(messages, tools=tools)
    [rendered] = render_documents(renderer, [document])
    assert text_of_ids(rendered, renderer) == as_transformers(file, messages, tools)
    assert trained_runs(rendered, renderer) == trained
    turns = len(messages) - 1
    [ids] = check_prompts(renderer, [(document, turns)])
    prompt = as_transformers(file, messages[:turns], tools, add_generation_prompt=True)
    assert renderer.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == prompt


def test_calls_and_tools_may_be_json_text_or_bare_functions_and_nulls_of_tables_are_absent(read):
    bare = {"name": "weather", "arguments": json.dumps({"city": "Ulm"})}
    null = {"name": "weather", "arguments": {"city": "Ulm", "unit": None}}
    wrapped = {"type": "function", "id": "", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    tools = json.dumps([WEATHER["function"]])
    for given in (bare, null, {"type": "function", "function": bare}):
        turn = {"role": "assistant", "content": None, "tool_calls": [given], "reasoning_content": "hm"}
        document = read([ASK, turn], tools=tools)
        assert document.messages[1].tool_calls == [wrapped] and document.messages[1].reasoning == "hm"
        assert document.tools == [WEATHER | {"id": ""}]


def test_reasoning_that_the_template_drops_from_earlier_turns_is_trained_where_it_was_written(open_with, read):
    renderer = open_with(thinking=True)
    talk = [ASK, answer("yes", reasoning="clouds"), {"role": "user", "content": "why?"}, answer("so", reasoning="sky")]
    found = render_documents(renderer, [read(talk)])
    thought = "<|channel>thought\n{}\n<channel|>{}<turn|>"
    assert [trained_runs(one, renderer) for one in found] == [
        [thought.format("clouds", "yes")],
        [thought.format("sky", "so")],
    ]
    assert text_of_ids(found[1], renderer) == as_transformers(NEWEST, talk, enable_thinking=True)
    assert text_of_ids(found[0], renderer).startswith("<bos><|turn>system\n<|think|>\n<turn|>\n")


CHANNEL_IN_PROMPT = "{%- if not enable_thinking -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}"


def test_a_template_that_asks_for_no_thoughts_takes_reasoning_only_with_data_thinking(open_with, read, tmp_path):
    """As the larger variants' templates, whose prompt ends in an empty thought."""
    text, begin = NEWEST.read_text(), "{{- '<|turn>model\\n' -}}"
    assert text.count(begin) == 1
    file = tmp_path / "large.jinja"
    file.write_text(text.replace(begin, begin + CHANNEL_IN_PROMPT))
    row = read([ASK, answer("yes", reasoning="clouds")])
    with pytest.raises(DataError, match=r"has reasoning, and the chat template asks for none; set data.thinking"):
        render_documents(open_with(file), [row])
    [rendered] = render_documents(renderer := open_with(file, thinking=True), [row])
    assert trained_runs(rendered, renderer) == ["<|channel>thought\nclouds\n<channel|>yes<turn|>"]


REFUSED = {
    "text beside": ([ASK, answer("wait", tool_calls=[ULM])], "has text beside its tool calls"),
    "no call": ([ASK, result("a", "wet"), answer("yes")], "is a tool's result with the tool_call_id 'a', and no tool"),
    "another id": ([ASK, calls(ULM), result("c", "wet"), answer("yes")], "with the tool_call_id 'c', and no tool call"),
    "no name": ([ASK, calls(ULM), {"role": "tool", "content": "wet"}, answer("yes")], "with the name None"),
    "not JSON": (
        [ASK, calls({"name": "weather", "arguments": "{city"})],
        "tool_calls[0].arguments is text that is not JSON",
    ),
    "a list": ([ASK, calls({"name": "weather", "arguments": [1]})], "arguments is a list; must be an object"),
    "nameless": ([ASK, calls({"arguments": {}})], "messages[1].tool_calls[0] names no function; must be {"),
    "not calls": ([ASK, calls() | {"tool_calls": "weather"}], "messages[1].tool_calls is text that is not JSON"),
    "user's": ([ASK | {"tool_calls": [ULM]}, answer("yes")], "unknown field tool_calls; allowed: role, content"),
    "a number": ([ASK, answer("yes", reasoning=3)], "has reasoning that is a number; must be text"),
    "end": ([ASK, calls(ULM), result("a", "wet")], "ends with messages[2], a turn of the role tool"),
    "control": ([ASK, calls(call("a", city="<turn|>"))], "messages[1] holds <turn|>, a control token"),
    "quote": ([ASK, calls(call("a", **{'<|"|>': 1}))], 'messages[1] holds <|"|>, a control token'),
    "result": ([ASK, calls(ULM), result("a", "<tool_response|>"), answer("y")], "messages[2] holds <tool_response|>"),
}


@pytest.mark.parametrize("name", [*REFUSED])
def test_what_cannot_be_used_is_refused_in_one_line(name, open_with, read):
    messages, said = REFUSED[name]
    with pytest.raises(DataError) as error:
        render_documents(open_with(), [read(messages)])
    assert said in str(error.value) and "\n" not in str(error.value)


@each(
    ("tools", "said"),
    [
        ("[", "tools is text that is not JSON"),
        ({"name": "weather"}, "tools is an object; must be a list of"),
        ([{"description": "?"}], "tools[0] names no function"),
        ([{"name": 5}], "tools[0] names no function"),
        ([{"name": "weather", "description": "<tool|>"}], "tools holds <tool|>, a control token"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_in_one_line(tools, said, open_with, read):
    with pytest.raises(DataError) as error:
        render_documents(open_with(), [read([ASK, answer("yes")], tools=tools)])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_a_template_does_not_write_is_refused_rather_than_lost(renderer, open_with, read):
    with pytest.raises(DataError, match=r"the chat template does not write its tool weather"):
        render_documents(renderer, [read([ASK, answer("yes")], tools=[WEATHER])])  # the tiny checkpoints' template
    older = next(file for file in TEMPLATES if file.stem == "gemma4")
    with pytest.raises(DataError, match=r"messages\[1\]: the chat template does not write 'clouds'"):
        render_documents(open_with(older), [read([ASK, answer("yes", reasoning="clouds")])])


def test_rows_that_differ_in_their_calls_or_tools_alone_do_not_count_as_the_same(read):
    rows = [read([ASK, calls(ULM)]), read([ASK, calls(BONN)]), read([ASK, calls(ULM)], tools=[WEATHER])]
    assert len({hash_turns(row) for row in rows}) == 3


def test_questions_are_not_asked_of_rows_with_tools(write_rows):
    for messages in ([ASK, calls(ULM), result("a", "wet")], [ASK, calls(ULM), result("a", "wet"), answer("yes")]):
        with pytest.raises(DataError, match=r"rows.jsonl line 1: has tools, which predict asks without; ask"):
            read_prompts(str(write_rows({"messages": messages})))
    assert read_prompts(str(write_rows({"messages": [ASK, answer("yes", reasoning="clouds")]}))).documents
