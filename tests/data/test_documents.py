"""What a row's messages are called in lines to the user."""

import pytest

from gemsmith.data.documents import Document
from gemsmith.tasks.messages import text_message

TURNS = (text_message("user", "a"), text_message("assistant", "b"))


@pytest.mark.parametrize(
    ("given", "names"), [((), ["messages[0]", "messages[1]"]), (("prompt", "response"), ["prompt", "response"])]
)
def test_messages_have_the_names_that_the_row_has_for_them(given, names):
    document = Document(messages=TURNS, origin="rows.jsonl line 1", names=given)
    assert [document.name(index) for index in range(2)] == names
