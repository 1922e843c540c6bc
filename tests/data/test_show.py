import io

from rich.console import Console

from gemsmith.data import prepare_data
from gemsmith.data.show import show

ROWS = [{"prompt": f"add {number}", "response": f"wire {number}"} for number in range(4)]


def printed(run, count, *, terminal):
    out = io.StringIO()
    show(run, count, console=Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None, width=200))
    return out.getvalue()


def prepared(make_run, write_rows):
    run = make_run(write_rows(*ROWS), {"max_length": 64})
    prepare_data(run)
    return run


def test_without_a_terminal_brackets_hold_what_is_trained_and_borders_show(make_run, write_rows):
    text = printed(prepared(make_run, write_rows), 1, terminal=False)
    assert "<bos><|turn>user\nadd 0<turn|>\n<|turn>model\n⟦wire 0<turn|>⟧\n" in text
    assert "── document 1: 19 tokens, 4 trained\n" in text
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
