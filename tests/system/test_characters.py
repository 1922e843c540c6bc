import json
import unicodedata

import pytest
import yaml

from gemsmith.system.characters import escape_control_chars, escape_control_chars_json, one_line, yaml_line


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("a\x1b[31mb\x1b]0;title\x07", r"a\x1b[31mb\x1b]0;title\x07"),
        ("\x9b31m \x85 \x7f \x08 \r \x0b \x0c \x00", r"\x9b31m \x85 \x7f \x08 \r \x0b \x0c \x00"),
        ("\u202egnp.exe\u2066 \u200f", r"\u202egnp.exe\u2066 \u200f"),
        ("\u2028\u2029\u200b\ufeff\u00ad\U000e0041", r"\u2028\u2029\u200b\ufeff\xad\U000e0041"),
        ("\udcff", r"\udcff"),
    ],
)
def test_what_a_terminal_acts_on_or_does_not_show_is_spelled_out(text, spelled):
    assert escape_control_chars(text) == spelled


@pytest.mark.parametrize(
    "text",
    [
        "ordinary",
        "tab\tand\nline feed",
        "é ß Ж 漢字 עברית ⟦x⟧ \\x1b [/a]",
        "हिन्दी\u200dक می\u200cخواهم",
        "👩\u200d💻 🏳️\u200d🌈",
    ],
)
def test_other_text_stays_as_it_is(text):
    assert escape_control_chars(text) == text


def test_no_control_character_and_no_mark_of_direction_is_left():
    found = {chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp")} - {
        "\t",
        "\n",
    }
    found |= {
        chr(code)
        for code in range(0x110000)
        if unicodedata.bidirectional(chr(code)) in ("LRE", "RLE", "LRO", "RLO", "PDF")
    }
    found |= set("\u2066\u2067\u2068\u2069")
    assert len(found) > 2000
    assert not [hex(ord(character)) for character in found if escape_control_chars(character) == character]


def test_a_line_stays_one_line_where_it_is_to_be_one():
    assert escape_control_chars("a\nb\r\nc", lines=False) == r"a\nb\r\nc"


def test_json_keeps_its_value_and_shows_no_such_character():
    value = {"name": "\x1b\x7f\x9b\u202e\U000e0041é", "line": "a\nb\t"}
    written = escape_control_chars_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(written) == value
    assert escape_control_chars(written) == written and "é" in written


ANY = 'a: b  # c\nd\re\x85f\u2028g\u2029h\x0b\x0c\x00\x1b\x7f\ufeff\uffff\ud800\U000e0041 "é 漢 😀\\'


def test_any_text_is_one_line_of_yaml_and_read_back_as_it_was():
    text = yaml_line([ANY, 1, None])
    assert yaml.safe_load(text) == [ANY, 1, None] and len(text.splitlines()) == 1


def test_no_text_ends_the_comment_that_it_is_in():
    assert yaml.safe_load(f"k: v  # {one_line(ANY)}") == {"k": "v"} and len(one_line(ANY).splitlines()) == 1
    assert one_line("a table,\n  of two lines\n") == "a table, of two lines"
