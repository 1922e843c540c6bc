import pyarrow
import pyarrow.parquet
import pytest

from gemsmith.data.dataset import Columns, describe_columns, read_dataset, source_sha256
from gemsmith.errors import DataError
from gemsmith.recipe.schema import Data, GeneratedData
from gemsmith.tasks.messages import text_message
from support.cases import each

PAIR = {"prompt": "add", "response": "wire"}
CHAT = {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "wire"}]}
AS_MESSAGES = (text_message("user", "add"), text_message("assistant", "wire"))


def refused(source: object, **options: object) -> str:
    with pytest.raises(DataError) as error:
        read_dataset(source if isinstance(source, GeneratedData) else str(source), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("row", [PAIR, CHAT], ids=["pair", "chat"])
def test_both_forms_of_jsonl_give_the_same_messages_and_say_their_line(row, write_rows):
    documents = read_dataset(str(write_rows(row, row))).documents
    assert [document.messages for document in documents] == [AS_MESSAGES] * 2
    assert [document.origin for document in documents] == ["rows.jsonl line 1", "rows.jsonl line 2"]


def test_content_in_text_parts_is_joined(write_rows):
    parts = [{"type": "text", "text": "ad"}, {"type": "text", "text": "d"}]
    row = {"messages": [{"role": "user", "content": parts}, CHAT["messages"][1]]}
    assert read_dataset(str(write_rows(row))).documents[0].messages == AS_MESSAGES


def test_content_of_no_parts_is_an_empty_text(write_rows):
    row = {"messages": [{"role": "system", "content": []}, *CHAT["messages"]]}
    assert read_dataset(str(write_rows(row))).documents[0].messages[0] == text_message("system", "")


@pytest.mark.parametrize("row", [PAIR, CHAT], ids=["pair", "chat"])
def test_parquet_gives_the_same_messages(row, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), tmp_path / "rows.parquet")
    documents = read_dataset(str(tmp_path / "rows.parquet")).documents
    assert [document.messages for document in documents] == [AS_MESSAGES] * 2
    assert documents[1].origin == "rows.parquet row 2"


@pytest.mark.parametrize("field", [{"audio": []}, {"refusal": ""}])
def test_an_empty_field_of_a_chat_api_is_as_if_absent_and_a_filled_one_is_refused(field, write_rows):
    def row(more):
        return {"messages": [CHAT["messages"][0], CHAT["messages"][1] | more]}

    assert read_dataset(str(write_rows(row(field)))).documents[0].messages == AS_MESSAGES
    [name] = field
    with pytest.raises(DataError, match=rf"messages\[1\] has an unknown field {name}; allowed: role, content"):
        read_dataset(str(write_rows(row({name: ["x"]}))))


def test_a_null_field_that_a_table_filled_in_is_as_if_absent(tmp_path):
    turns = [CHAT["messages"][0] | {"name": None}, CHAT["messages"][1] | {"name": None}]
    schema = pyarrow.schema(
        {"messages": pyarrow.list_(pyarrow.struct(dict.fromkeys(("role", "content", "name"), pyarrow.string())))}
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}], schema), tmp_path / "rows.parquet")
    assert read_dataset(str(tmp_path / "rows.parquet")).documents[0].messages == AS_MESSAGES


def test_rows_are_made_from_the_seed():
    made = GeneratedData(task="verilog", rows=3)
    first, again, other = (read_dataset(made, seed=seed).documents for seed in (1, 1, 2))
    assert first == again != other
    assert first[2].origin == "verilog train row 3"


def test_the_source_hash_follows_the_bytes(write_rows):
    one, other = write_rows(PAIR, name="a.jsonl"), write_rows(CHAT, name="b.jsonl")
    assert source_sha256(str(one)) == source_sha256(str(one)) != source_sha256(str(other))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_dataset_is_refused(text, tmp_path):
    (tmp_path / "rows.jsonl").write_text(text)
    assert "holds no rows" in refused(tmp_path / "rows.jsonl")


def test_half_a_surrogate_pair_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(r'{"prompt": "a\ud800", "response": "b"}')
    assert "line 1: prompt holds half a surrogate pair at character 2" in refused(tmp_path / "rows.jsonl")


@each(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "line 1: has no assistant turn"),
        ({"messages": []}, "line 1: has no assistant turn"),
        ({"messages": CHAT["messages"][:2] * 3000}, "line 1: has 6,000 turns; allowed are 4,096"),
        ({"prompt": "a\ufdd0\ufdef", "response": "b"}, "line 1: prompt holds U+FDD0 before U+FDEF, which are no"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "begins with an assistant turn"),
        ({"prompt": "a", "response": "  "}, "response is an empty answer"),
        ({"prompt": " ", "response": "a"}, "line 1: prompt is an empty prompt; fill it, or take the row out"),
        ({"messages": [{"role": "user", "content": []}, CHAT["messages"][1]]}, "messages[0] is an empty prompt"),
        (
            {"messages": [*CHAT["messages"], {"role": "user", "content": "and?"}]},
            "line 1: ends with messages[2], a turn of the role user that nothing answers",
        ),
        (
            {"messages": [*CHAT["messages"], {"role": "system", "content": "b"}]},
            "a turn of the role system that nothing",
        ),
        ({"prompt": "a", "response": 3}, "response is a number; must be text"),
        ({"prompt": None, "response": "a"}, "prompt is null; must be text"),
        ({"messages": "a"}, "messages is text; must be a list"),
        ({"messages": ["a"]}, "messages[0] is text; must be an object"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        (
            {"messages": [{"role": "usr", "content": "a"}]},
            "messages[0] has the role 'usr' (did you mean user?); allowed: system, user, assistant",
        ),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0] has the role ['user']"),
        (
            {"messages": [{"role": "user", "contents": "a", "content": "b"}]},
            "unknown field contents (did you mean content?)",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "messages[0] has an image at 'x'; only file:// and data: URLs are read: fetch it first",
        ),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0] is an object; must be text"),
        (
            {"message": []},
            "has the columns message (did you mean messages?); allowed: messages, or prompt and response",
        ),
        ({"prompt": "a"}, "has the columns prompt"),
        ({"prompt": "a", "complete": "b"}, "has the columns prompt, complete (did you mean completion?); allowed"),
        (
            {"id": 1, "prompt": "a", "respnse": "b"},
            "has the columns id, prompt, respnse (did you mean response?); allowed: messages",
        ),
        (PAIR | {"System": "be brief"}, "has a value in the column System, which changes what a row says"),
        ({"text": "x", "tools": [{"name": "f"}]}, "has a value in the column tools"),
        (CHAT | {"functions": [{"name": "f"}]}, "has a value in the column functions"),
        (CHAT | {"Images": ["a.png"]}, "has a value in the column Images"),
        (PAIR | {"weight": 0}, "rename or drop the column to train without it"),
        (dict.fromkeys("abcdefghij"), "has the columns a, b, c, d, e, f, g, h and 2 more; allowed: messages"),
        (
            PAIR | CHAT,
            "has messages, prompt and response; keep messages, or prompt and response, or set data.format to messages",
        ),
        ({"messages": None, "prompt": None, "response": None}, "messages is null"),
        ([1], "is a list; must be an object"),
        (None, "is null; must be an object"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_refused_with_its_line(row, message, write_rows):
    text = refused(write_rows(row))
    assert message in text
    assert "rows.jsonl line 1" in text


def test_other_columns_are_ignored_and_their_values_counted(write_rows):
    rows = [PAIR | {"id": 1, "source": "a"}, PAIR | {"id": "two", "source": None}, PAIR | {"id": 0}]
    dataset = read_dataset(str(write_rows(*rows)))
    assert [document.messages for document in dataset.documents] == [AS_MESSAGES] * 3
    assert dataset.ignored_columns == {"id": 3, "source": 1}


def test_a_prompt_beside_messages_is_another_column(write_rows):
    dataset = read_dataset(str(write_rows(CHAT | {"prompt": "add", "prompt_id": "f00"})))
    assert dataset.documents[0].messages == AS_MESSAGES
    assert dataset.ignored_columns == {"prompt": 1, "prompt_id": 1}


@pytest.mark.parametrize(
    ("form", "ignored"), [("messages", {"prompt": 1, "response": 1}), ("prompt-response", {"messages": 1})]
)
def test_of_a_row_of_both_forms_the_one_that_the_recipe_names_is_read(form, ignored, write_rows):
    dataset = read_dataset(str(write_rows(CHAT | PAIR)), data=Data(train="-", format=form))
    assert (dataset.documents[0].messages, dataset.ignored_columns) == (AS_MESSAGES, ignored)


def test_a_later_row_of_both_forms_is_refused(write_rows):
    assert "rows.jsonl line 2: has messages, prompt and response" in refused(write_rows(CHAT, CHAT | PAIR))


def test_columns_of_the_other_form_that_a_table_filled_with_null_are_no_columns(write_rows):
    dataset = read_dataset(str(write_rows(CHAT | dict.fromkeys(PAIR), CHAT)))
    assert [document.messages for document in dataset.documents] == [AS_MESSAGES] * 2
    assert dataset.ignored_columns == {}


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_a_column_that_would_change_the_row_but_says_nothing_is_ignored(nothing, write_rows):
    assert read_dataset(str(write_rows(CHAT | {"tools": nothing}))).documents[0].messages == AS_MESSAGES


def test_a_misspelt_column_in_a_later_row_is_refused_by_its_name(write_rows):
    text = refused(write_rows(PAIR | {"id": 1}, {"prompt": "a", "respnse": "b", "id": 2}))
    assert (
        "line 2: has the columns prompt, respnse, id (did you mean response?), but the rows before it are "
        "prompt-response" in text
    )


def test_other_columns_of_a_table_are_counted_and_never_decoded(tmp_path):
    columns = {
        "when": pyarrow.array([2**62, None], pyarrow.timestamp("us")),  # a year that Python has no date for
        "file": pyarrow.array([b"\xff\xd8", b""]),
        "kind": pyarrow.array(["a", "b"]).dictionary_encode(),
        "nothing": pyarrow.nulls(2),
    }
    table = pyarrow.table({"prompt": [PAIR["prompt"]] * 2, "response": [PAIR["response"]] * 2} | columns)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    dataset = read_dataset(str(tmp_path / "rows.parquet"))
    assert [document.messages for document in dataset.documents] == [AS_MESSAGES] * 2
    assert dataset.ignored_columns == {"file": 2, "kind": 2, "when": 1}


def test_names_of_columns_can_stand_in_a_line_and_in_a_record(write_rows):
    odd = {"id": 1, "a\nb": 1, "": 1, "\ud800": 1, "[red]": 1}
    dataset = read_dataset(str(write_rows(PAIR | odd, PAIR | {"id": 2})))
    assert dataset.ignored_columns == {"id": 2, r"'a\nb'": 1, "''": 1, r"'\ud800'": 1, "[red]": 1}
    assert (
        describe_columns(dataset.ignored_columns)
        == r"id (2 rows), 'a\nb' (1 row), '' (1 row), '\ud800' (1 row), [red] (1 row)"
    )
    assert r"has the columns 'a\nb'; allowed" in refused(write_rows({"a\nb": 1}))


def test_a_message_names_the_first_few_columns():
    assert describe_columns({f"c{number}": 3000 for number in range(10)}).endswith("c7 (3,000 rows) and 2 more")


def test_mixed_forms_are_refused(write_rows):
    assert "line 2: has the columns messages, but the rows before it are prompt-response" in refused(
        write_rows(PAIR, CHAT)
    )


def test_another_form_than_the_recipe_names_is_refused(write_rows):
    assert "line 1: has the columns prompt, response, but data.format is messages" in refused(
        write_rows(PAIR), data=Data(train="-", format="messages")
    )


@pytest.mark.parametrize("table", [False, True], ids=["jsonl", "parquet"])
def test_a_column_that_was_asked_for_is_read_and_not_counted_as_ignored(table, write_rows, tmp_path):
    rows = [PAIR | {"test": ["a", "b"], "id": 1}, PAIR | {"test": [], "id": 2}]
    file = write_rows(*rows)
    if table:
        file = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    dataset = read_dataset(str(file), columns=Columns(needed=("test",)))
    assert [document.columns for document in dataset.documents] == [{"test": ["a", "b"]}, {"test": []}]
    assert dataset.ignored_columns == {"id": 2}


def test_a_row_without_a_column_that_was_asked_for_is_refused(write_rows):
    rows = write_rows(PAIR | {"test": "a"}, PAIR | {"test": None})
    with pytest.raises(DataError, match=r"^rows\.jsonl line 2: has no test, which eval.scorer reads; add it, set"):
        read_dataset(str(rows), columns=Columns(needed=("test",)))
