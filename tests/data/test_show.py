import io

from gemsmith.data.preview import show
from gemsmith.data.stage import prepare_data
from gemsmith.system.console import open_console

ROWS = [{"prompt": f"add {number}", "response": f"wire {number}"} for number in range(4)]


def printed(run, count, *, terminal):
    out = io.StringIO()
    colors = "standard" if terminal else None
    show(run, count, console=open_console(file=out, force_terminal=terminal, color_system=colors, width=200))
    return out.getvalue()


def prepared(make_run, write_rows):
    run = make_run(write_rows(*ROWS), {"max_length": 64})
    prepare_data(run)
    return run


def test_without_a_terminal_brackets_hold_what_is_trained_and_borders_show(make_run, write_rows):
    text = printed(prepared(make_run, write_rows), 1, terminal=False)
    assert "<bos><|turn>user\nadd 0<turn|>\n<|turn>model\n⟦wire 0<turn|>⟧\n" in text
    assert "── document 1: 19 tokens, 4 in the loss\n" in text
    assert "── document 3: " in text
    assert "── padding: 7 tokens" in text
    assert "\x1b[" not in text
    assert "row 2" not in text


def test_on_a_terminal_what_is_trained_is_green_and_the_prompt_dim(make_run, write_rows):
    text = printed(prepared(make_run, write_rows), 1, terminal=True)
    assert "\x1b[1;32mwire 0<turn|>\x1b[0m" in text
    assert "\x1b[2m<bos><|turn>user\x1b[0m" in text
    assert "⟦wire" not in text


def test_more_rows_than_there_are_shows_all(make_run, write_rows, capsys):
    show(prepared(make_run, write_rows), 99)
    out = capsys.readouterr().out
    assert "2 packed rows of 64 tokens" in out and "row 2: 1 documents" in out


def test_what_a_terminal_would_act_on_in_a_row_is_spelled_out(make_run, write_rows):
    row = {"prompt": "a\x1b[31mb\x9bK\rc\nd\u202ee é", "response": "[/a] [bold]\x07\x08"}
    run = make_run(write_rows(row), {"max_length": 64})
    prepare_data(run)
    for terminal in (False, True):
        text = printed(run, 1, terminal=terminal)
        assert not set("\x9b\r\u202e\x07\x08") & set(text)
        assert r"\x1b[31mb\x9bK\rc" in text and r"[/a] [bold]\x07\x08" in text
        assert r"d\u202ee é" in text
