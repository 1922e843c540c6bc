import os
import re

import pytest

from gemsmith.system.json import parse_json, read_json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "b": {"c": 1, "\\u0063": 2}}', "c is given twice; keep one"),
        ("[" * 200_000, "is nested too deeply"),
        ('{"a": 1' + "0" * 400 + "}", "has a number of 401 digits"),
        ("{", "Expecting property name"),
    ],
)
def test_what_python_takes_silently_or_trips_over_is_one_line(text, said):
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        parse_json(text)
    assert "\n" not in str(refused.value)


def test_a_file_of_settings_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": [1, 2.5]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, 2.5]}


def test_a_file_nested_deeper_than_its_readers_go_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[" * 500 + "]" * 500)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "a.json")


def test_what_is_no_regular_file_or_too_large_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("[" + "1," * 100)
    with pytest.raises(OSError, match="is not a regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(OSError, match="has 201 bytes, more than 100"):
        read_json(tmp_path / "large", most_bytes=100)
