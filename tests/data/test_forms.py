"""Forms of rows: the same conversation in each, and what of each is refused."""

import json
import re
from typing import get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gemsmith.data.dataset import read_dataset, read_prompts
from gemsmith.data.forms import COLUMNS, FORMS, guess_columns
from gemsmith.data.parts import IMAGE_COLUMNS
from gemsmith.data.tokenize import open_renderer, render_documents
from gemsmith.errors import DataError
from gemsmith.recipe.schema import Data
from gemsmith.tasks.messages import ImagePart, TextPart, text_message
from support.cases import each

USER, ASSISTANT = {"role": "user", "content": "add"}, {"role": "assistant", "content": "wire"}
SAID = [{"from": "human", "value": "add"}, {"from": "gpt", "value": "wire"}]
ROWS = {
    "messages": {"messages": [USER, ASSISTANT]},
    "prompt-response": {"prompt": "add", "response": "wire"},
    "prompt-completion": {"prompt": "add", "completion": "wire"},
    "alpaca": {"instruction": "add", "output": "wire"},
    "sharegpt": {"conversations": SAID},
    "question-answer": {"question": "add", "answer": "wire"},
}
SYSTEM, ADD, WIRE = text_message("system", "be brief"), text_message("user", "add"), text_message("assistant", "wire")


def refused(source: object, **options: object) -> str:
    with pytest.raises(DataError) as error:
        read_dataset(str(source), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_recipe_names_each_form_and_column():
    fields = Data.model_fields
    assert {*get_args(fields["format"].annotation)} == {"auto", "image-folder", *FORMS}
    assert {*get_args(get_args(fields["columns"].annotation)[0])} == COLUMNS | {*IMAGE_COLUMNS}


@pytest.mark.parametrize("form", [*ROWS])
@pytest.mark.parametrize("chosen", [False, True])
def test_every_form_comes_to_the_same_messages_by_its_columns_or_by_name(form, chosen, write_rows):
    found = read_dataset(
        str(write_rows(ROWS[form] | {"id": 1})), data=Data(train="-", format=form if chosen else "auto")
    )
    assert found.documents[0].messages == (ADD, WIRE)
    assert found.ignored_columns == {"id": 1}


@each("form", [*ROWS])
def test_a_table_gives_what_lines_give(form, tmp_path):
    row = ROWS[form] | {"system": "be brief", "text": "### add"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row | {"system": None}]), tmp_path / "rows.parquet")
    found = read_dataset(str(tmp_path / "rows.parquet"))
    assert [document.messages for document in found.documents] == [(SYSTEM, ADD, WIRE), (ADD, WIRE)]
    assert [document.context for document in found.documents] == ([2, 1] if form == "prompt-completion" else [0, 0])
    assert found.ignored_columns == {"text": 2}


def test_an_input_follows_its_instruction_on_a_line_of_its_own(write_rows):
    rows = [ROWS["alpaca"] | {"input": given, "system": ""} for given in ("1 and 2", "", None)]
    documents = read_dataset(str(write_rows(*rows))).documents
    assert [row.messages[0] for row in documents] == [text_message("user", "add\n1 and 2"), ADD, ADD]
    assert documents[0].name(1) == "output"


def test_sharegpts_speakers_are_roles_and_turns_with_roles_stay(write_rows):
    said = [{"from": "system", "value": "be brief"}, SAID[0] | {"weight": None}, SAID[1]]
    rows = [{"conversations": said}, {"conversations": [USER, ASSISTANT]}]
    assert [row.messages for row in read_dataset(str(write_rows(*rows))).documents] == [
        (SYSTEM, ADD, WIRE),
        (ADD, WIRE),
    ]


def test_the_role_model_is_that_of_an_answer_and_developer_that_of_the_system(write_rows):
    said = [{"role": "user", "content": "add"}, {"role": "model", "content": "wire", "reasoning": "why"}]
    rows = [{"messages": said}, {"prompt": said[:1], "completion": said[1:]}, {"conversations": said}]
    for document in (read_dataset(str(write_rows(row))).documents[0] for row in rows):
        assert [turn.role for turn in document.messages] == ["user", "assistant"]
        assert document.messages[1].beside == {"reasoning": "why"}
    told = {"role": "developer", "content": "be brief"}
    assert read_dataset(str(write_rows({"messages": [told, *said]}))).documents[0].messages[0] == SYSTEM


def test_of_lists_of_messages_the_completion_alone_is_trained(write_rows, tokenizer_folder):
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}
    (document,) = read_dataset(str(write_rows(row))).documents
    assert (document.answers, document.name(2), document.name(3)) == ([3], "prompt[2]", "completion[0]")
    renderer = open_renderer(tokenizer_folder)
    (all_answers,) = render_documents(
        renderer, read_dataset(str(write_rows({"messages": [*row["prompt"], ASSISTANT]}))).documents
    )
    (last,) = render_documents(renderer, [document])
    assert np.array_equal(last.ids, all_answers.ids)
    assert 0 < last.trained.sum() < all_answers.trained.sum()
    first = int(np.flatnonzero(last.trained)[0])
    assert np.array_equal(last.trained[first:], all_answers.trained[first:])


def test_all_of_raw_text_is_trained_and_its_end(write_rows, tokenizer_folder):
    (document,) = read_dataset(str(write_rows({"text": " wire\nadd", "id": 1}))).documents
    renderer = open_renderer(tokenizer_folder)
    (rendered,) = render_documents(renderer, [document])
    inner = renderer.tokenizer.encode(" wire\nadd", add_special_tokens=False).ids
    assert rendered.ids.tolist() == [2, *inner, 1]
    assert rendered.trained.tolist() == [False] + [True] * (len(inner) + 1)


def test_control_tokens_in_raw_text_are_refused(write_rows, tokenizer_folder):
    documents = read_dataset(str(write_rows({"text": "<|turn>user"}))).documents
    with pytest.raises(DataError, match=r"^rows.jsonl line 1: text holds <\|turn>"):
        render_documents(open_renderer(tokenizer_folder), documents)


@pytest.mark.parametrize("form", ["prompt-response", "alpaca", "question-answer", "prompt-completion"])
def test_images_of_a_column_stand_before_the_question(form, write_rows, tmp_path):
    (document,) = read_dataset(str(write_rows(ROWS[form] | {"image": "a.png"}))).documents
    assert document.messages[0].parts == (ImagePart(path=str(tmp_path / "a.png")), TextPart(text="add"))


def test_other_names_of_columns_are_those_that_the_recipe_gives(write_rows):
    row = {"task": "add", "code": "wire", "prompt": "old", "picture": None, "id": 1}
    names = {"prompt": "task", "response": "code", "image": "picture"}
    found = read_dataset(str(write_rows(row)), data=Data(train="-", columns=names))
    assert (found.documents[0].messages, found.ignored_columns) == ((ADD, WIRE), {"id": 1})
    assert not found.warnings
    other = read_dataset(str(write_rows({"prompt": "add", "code": "wire"})), data=Data(train="-", columns=names))
    assert re.fullmatch(
        r"data\.train: no row of .*\.jsonl has picture, task, which data\.columns names", *other.warnings
    )
    text = refused(write_rows({"task": "add", "cod": "wire"}), data=Data(train="-", columns=names))
    assert "has the columns cod, prompt, and none that data.columns has as {response: code}; allowed: messages" in text


@each(
    ("columns", "guess"),
    [
        (["Prompt", " response"], {"prompt": "Prompt", "response": " response"}),
        (["instruction", "context", "response", "category"], {"input": "context", "output": "response"}),
        (["input", "label"], {"prompt": "input", "response": "label"}),
        (["conversation", "id"], {"conversations": "conversation"}),
        (["id", "system_prompt", "question", "response"], {"prompt": "question", "system": "system_prompt"}),
        (["messages", "System"], {"system": "System"}),
        (["question", "answer", "context"], {}),  # a form's
        (["prompt", "chosen", "rejected"], {}),
        (["question", "answer_1", "answer_2"], {}),
        (["query", "task", "answer"], {}),  # two may be the question
        (["text", "label"], {}),
        (["Prompt", "prompt", "response"], {}),  # a form's, and more
        (["Prompt", "prompt ", "output"], {}),
        ([], {}),
    ],
)
def test_what_columns_of_other_names_may_be_is_guessed_where_that_is_plain(columns, guess):
    assert guess_columns(columns) == guess


def test_columns_that_may_be_a_forms_are_told_so(write_rows):
    text = refused(write_rows({"Prompt": "add", "Response": "wire"}))
    assert "; data.columns names others, here perhaps {prompt: Prompt, response: Response}" in text


def test_other_names_of_columns_are_read_from_tables(tmp_path):
    table = pyarrow.Table.from_pylist([{"task": "add", "code": "wire", "when": "now"}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    found = read_dataset(
        str(tmp_path / "rows.parquet"), data=Data(train="-", columns={"prompt": "task", "response": "code"})
    )
    assert (found.documents[0].messages, found.ignored_columns) == ((ADD, WIRE), {"when": 1})


@each(
    ("row", "message"),
    [
        (
            ROWS["prompt-response"] | ROWS["alpaca"],
            "has prompt, response, instruction and output; keep prompt and response, or instruction and output, or set "
            "data.format to prompt-response or alpaca",
        ),
        (ROWS["alpaca"] | {"history": [["a", "b"]]}, "a value in the column history, which changes what a row says"),
        ({"text": "add", "system": "be brief"}, "has a value in the column system, which changes"),
        (
            ROWS["question-answer"] | {"system_prompt": "be brief"},
            "does not read; name it system, here or in data.columns",
        ),
        (
            {"instruction": "a", "input": 3, "output": "b"},
            "instruction is text, input a number; both must be text",
        ),
        ({"instruction": ["a"], "output": "b"}, "instruction has a part that is text; a part must be"),
        ({"conversations": "a"}, "conversations is text; must be a list of {from, value}"),
        ({"conversations": [{"from": "tool", "value": "a"}]}, "conversations[0] is from 'tool'; allowed: human, user,"),
        ({"conversations": [{"from": "human"}]}, "conversations[0] has no value; must have from and value"),
        ({"conversations": [SAID[0] | {"weight": 1}]}, "has an unknown field weight; allowed: from, value"),
        ({"conversations": [SAID[1]]}, "begins with an assistant turn"),
        ({"conversations": ["a"]}, "conversations[0] is text; must be an object with role and content"),
        ({"prompt": [USER], "completion": [USER]}, "completion has no assistant turn; add one"),
        ({"prompt": "a", "completion": " "}, "completion is an empty answer"),
        ({"text": " "}, "text is empty; write some, or take the row out"),
        ({"text": 3}, "text is a number; write some, or take"),
        ({"text": "a", "image": "a.png"}, "1 of the 1 images in its column have no place"),
    ],
)
def test_a_row_that_its_form_has_no_turns_for_is_refused_with_its_line(row, message, write_rows):
    text = refused(write_rows(row))
    assert message in text
    assert text.startswith("rows.jsonl line 1: ")


def test_rows_of_another_form_than_the_named_one_are_told_its_columns(write_rows):
    text = refused(write_rows(ROWS["alpaca"]), data=Data(train="-", format="question-answer"))
    assert "instruction, output, but data.format is question-answer, of question and answer; all rows must" in text


@pytest.mark.parametrize("form", [*ROWS])
def test_prompts_are_read_from_rows_of_each_form_with_an_answer_or_without(form, write_rows):
    row = json.loads(json.dumps(ROWS[form]))
    asks = {name: value for name, value in row.items() if name != FORMS[form].answer}
    if FORMS[form].answer is None:
        asks = {name: turns[:-1] for name, turns in row.items()}
    for given in (row, asks):
        assert [document.messages for document in read_prompts(str(write_rows(given))).documents] == [(ADD,)]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"conversations": [SAID[0], {"from": "assistant", "value": "3"}]}, ["user"]),
        ({"conversations": [USER]}, ["user"]),
        ({"conversations": [USER, ASSISTANT, USER]}, ["user", "assistant", "user"]),
        ({"prompt": [USER]}, ["user"]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, ["user"]),
        ({"prompt": "a", "response": None}, ["user"]),
    ],
)
def test_prompts_end_with_what_is_asked_however_turns_are_written(row, asked, write_rows):
    (document,) = read_prompts(str(write_rows(row))).documents
    assert [message.role for message in document.messages] == asked


def test_prompts_of_rows_in_no_form_are_told_their_columns(write_rows):
    with pytest.raises(DataError, match="line 1: has the columns foo; allowed: messages, or "):
        read_prompts(str(write_rows({"foo": "a"})))


def test_raw_text_asks_nothing(write_rows):
    with pytest.raises(DataError, match=r"line 1: is raw text, which asks nothing; name the column prompt$"):
        read_prompts(str(write_rows({"text": "a"})))
