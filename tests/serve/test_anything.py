"""What is printed for a machine that is not this one; and serving what is no run."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.runs.run import Run, open_source
from gemsmith.serve.command import GPU_IMAGE
from gemsmith.serve.server import Server
from gemsmith.serve.stage import curl_line
from support.cases import each

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "verilog_31b_v6e-8": ("recipes/verilog_31b.yaml", "v6e-8"),
    "verilog_31b_v5e-4": ("recipes/verilog_31b.yaml", "v5e-4"),
    "verilog_31b_1xh100": ("recipes/verilog_31b.yaml", "1xh100"),
    "verilog_31b_2xh100": ("recipes/verilog_31b.yaml", "2xh100"),
    "verilog_31b_8xh100": ("recipes/verilog_31b.yaml", "8xh100"),
    "verilog_31b_g4-standard-48": ("recipes/verilog_31b.yaml", "g4-standard-48"),
    "demo_cpu": ("recipes/demo.yaml", "cpu"),
    "hub_2xh100": ("google/gemma-4-26B-A4B-it", "2xh100"),
    "images_2xh100": ("google/gemma-4-26B-A4B-it", "2xh100", "--set", "serve.images=true"),
    "images_v6e-8": ("google/gemma-4-31B-it", "v6e-8", "--set", "serve.images=true"),
    "images_cpu": ("google/gemma-4-E2B-it", "cpu", "--set", "serve.images=true"),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gemsmith: Callable[..., tuple[int, str, str]]
) -> Callable[..., tuple[str, str]]:
    """The command and its reasons, as in a fresh clone: no run, no weights, no vLLM."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("GEMSMITH_SERVE_PYTHON", ".venv-serve/bin/python")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def run(source: str, machine: str, *more: str) -> tuple[str, str]:
        code, out, err = gemsmith("serve", source, "--machine", machine, "--print", *more)
        assert code == 0, err
        return out.replace(str(ROOT), "/gemsmith").replace(str(tmp_path), "/gemsmith"), err

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_command_for_a_machine_is_the_one_that_was_read_and_kept(
    name: str, printed: Callable[..., tuple[str, str]]
) -> None:
    """To change it on purpose: GEMSMITH_GOLDEN=write pytest tests/serve/test_anything.py, and read the difference."""
    out, err = printed(*CASES[name])
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("GEMSMITH_GOLDEN") == "write":
        file.write_text(err + out)
    assert err + out == file.read_text()


@each("name", CASES)
def test_a_golden_command_is_what_a_shell_takes_whole(name: str) -> None:
    syntax = subprocess.run(["bash", "-n", str(GOLDEN / f"{name}.sh")], capture_output=True, text=True, check=False)
    assert (syntax.returncode, syntax.stderr) == (0, "")


def test_a_key_is_named_and_never_printed(
    printed: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    for machine, expected in (("2xh100", "--env VLLM_API_KEY \\"), ("cpu", 'VLLM_API_KEY="$VLLM_API_KEY" \\')):
        out, err = printed("google/gemma-4-E2B-it", machine, "--set", "serve.host=0.0.0.0")
        assert expected in out and "--host 0.0.0.0" in out and "s3cret" not in out + err


def test_a_wide_host_without_a_key_is_refused_in_one_line(
    gemsmith: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    options = ("--machine", "2xh100", "--print", "--set", "serve.host=0.0.0.0")
    code, out, err = gemsmith("serve", "google/gemma-4-E2B-it", *options)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "serve.host: 0.0.0.0 lets other machines in, and $VLLM_API_KEY is not set" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["google/gemma-4-E2B-it", "--machine", "2xh10", "--print"],
            "--machine: '2xh10' is not in the catalog (did you mean 2xh100",
        ),
        (["google/gemma-4-E2B-it", "--machine", "8xb200"], "this host has 0 of its 8 b200"),
        (
            ["google/gemma-4-E2B-it", "--print", "--set", "lora.rank=4"],
            "--set lora.rank: google/gemma-4-E2B-it is no run",
        ),
        (["somebody/unknown", "--print"], "is not here to read what model it is; add --set model="),
        (
            ["google/gemma-4-E2B-it", "--json"],
            "--json, --run, --restart and --skip-verify-check are for a run",
        ),
        (["nothing.yaml", "--print"], "is neither a recipe nor a run directory"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    arguments: list[str], expected: str, gemsmith: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemsmith.serve.container._output", lambda command: "")
    code, out, err = gemsmith("serve", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1) and expected in err


def test_a_run_prints_what_it_has(
    exported_run: Callable[..., Run], gemsmith: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_source(exported_run({"data": {"max_length": 64}}).path, lock=lambda folder: None)
    code, out, err = gemsmith("serve", run.path, "--machine", "1xh100", "--print")
    assert code == 0 and f"--volume {run.merged}:/model:ro" in out and "not there yet" not in err
    assert "--max-model-len 640" in out, "the recipe's own"


def test_a_printed_server_of_other_weights_than_were_trained_on_is_told_of(
    exported_run: Callable[..., Run], gemsmith: Callable[..., tuple[int, str, str]]
) -> None:
    path = exported_run({"train": {"dtype": "nf4"}}).path
    for weights, told in (("adapter", True), ("merged", False)):
        code, _, err = gemsmith("serve", path, "--machine", "1xh100", "--print", "--set", f"serve.weights={weights}")
        assert code == 0 and ("# The adapter was trained on the base in nf4" in err) == told


def test_a_folder_is_served_until_it_is_stopped_and_leaves_nothing(
    fake_vllm: Callable[..., Path],
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    gemsmith: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm()
    shutil.copytree(tiny_checkpoint("tiny-31b"), tmp_path / "tuned" / "merged")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    seen: list[Server] = []

    def curl(server: Server) -> str:
        seen.append(server)
        server.process.terminate()
        return curl_line(server)

    monkeypatch.setattr("gemsmith.serve.stage.curl_line", curl)
    code, out, err = gemsmith("serve", tmp_path / "tuned")
    assert code == 1 and "vLLM died" in err and '"model": "tuned"' in out
    assert "--max-model-len" in seen[0].command and "2048" in seen[0].command, "no more than the model reads"
    assert not list((tmp_path / "scratch").iterdir())


DOCKER = """#!{python} -I
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "version":
    print("28.2.2")
if sys.argv[1] == "run":
    serve = sys.argv.index("serve")
    os.execv({vllm!r}, [{vllm!r}, "-m", "vllm.entrypoints.openai.api_server", "--model", *sys.argv[serve + 1 :]])
"""


def test_on_the_machine_itself_the_same_command_runs_in_docker_and_its_container_is_removed(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    tmp_path: Path,
    gemsmith: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm, log, programs = fake_vllm(version_json={"version": "0.32.0"}), tmp_path / "docker.log", tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER.format(python=sys.executable, log=str(log), vllm=str(vllm)))
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100 80GB HBM3\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    run = open_source(
        exported_run({"data": {"max_length": 64}, "serve": {"max_model_len": 640}}).path, lock=lambda folder: None
    )
    printed = gemsmith("serve", run.path, "--machine", "1xh100", "--print", "--set", "serve.port=8123")[1]
    seen: list[Server] = []
    monkeypatch.setattr(
        "gemsmith.serve.stage.curl_line",
        lambda server: (seen.append(server), server.process.terminate(), curl_line(server))[2],
    )
    code, _, err = gemsmith("serve", run.path, "--machine", "1xh100", "--set", f"serve.port={free_port()}")
    assert code == 1 and "vLLM died" in err, err
    assert seen[0].vllm == f"{GPU_IMAGE} ", "the engine is the image"
    asked, started, removed = (json.loads(line) for line in log.read_text().splitlines())
    assert asked[0] == "version" and started[:4] == ["run", "--rm", "--init", "--name"]
    instance_id = started[4]
    assert removed == ["rm", "--force", instance_id]
    ran = [word for word in ["docker", *started] if word not in ("--name", instance_id)]
    place = ran.index("--port") + 1
    ran[place] = "8123"
    assert shlex.split(printed.replace("\\\n", "")) == ran


def test_a_folder_without_a_checkpoint_says_what_it_lacks(
    tmp_path: Path, gemsmith: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = gemsmith("serve", tmp_path, "--print")
    assert code == 2 and "holds neither recipe.yaml nor config.json" in err
