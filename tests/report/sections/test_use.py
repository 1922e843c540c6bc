"""The box that says how to use what came out."""

from gemsmith.report.page import render_page
from gemsmith.runs.records import ServeRecord, ServerFacts
from gemsmith.runs.run import read_record, write_record


def test_the_commands_name_the_run_as_a_shell_takes_it(make_run, section_words):
    words = section_words(make_run("my run", steps=2), "use")
    for command in ("gemsmith chat 'my run'", "gemsmith serve 'my run'", "gemsmith push 'my run' --to hub:OWNER/NAME"):
        assert command in words
    assert "adapter/, 1.94 GB" in words and "merged/, 31.4 GB" in words and "rows of 4,096 tokens" in words
    assert "--skip-verify-check" not in words
    assert "--skip-verify-check" in section_words(make_run("bad", steps=2, verified=False), "use")


def test_the_context_is_the_server_s(make_run, section_words):
    run = make_run(steps=2)
    assert "served not recorded; serve.max_model_len sets it" in section_words(run, "use")
    server = ServerFacts(max_model_len=2048)
    write_record(run, read_record(run, ServeRecord).model_copy(update={"server": server}))
    assert "served 2,048 tokens at most" in section_words(run, "use")


def test_without_exported_weights_there_is_nothing_to_use(make_run, undrawn):
    page = render_page(make_run(steps=2, without=("export",)))
    assert 'id="use"' not in page and "Use this model" not in page
