"""A described server as a command line: for a process, and for a shell."""

import contextlib
import shlex
from pathlib import Path

import pytest

from gemsmith.errors import RecipeError
from gemsmith.serve.container import Deployment, Mount, as_command, as_shell, refuse_open_server
from gemsmith.serve.settings import ServeSettings

IN_DOCKER = Deployment(
    image="i:1",
    program=("serve",),
    docker_flags=("--gpus", "all"),
    environment={"A": "b c"},
    passed=("KEY",),
    mounts=(Mount(host="runs/my run", inside="/model"), Mount(host="~/.cache/x", inside="/x", writable=True)),
    arguments=("/model", "--hf-overrides", '{"a": ["b"]}', "--flag"),
    port=8000,
)


def test_a_shell_gets_a_line_for_each_option_and_paths_that_hold_where_it_is_pasted() -> None:
    lines = [line.removesuffix(" \\").strip() for line in as_shell(IN_DOCKER).splitlines()]
    assert lines == [
        "docker run --rm --init",
        "--gpus all",
        "--volume \"$PWD\"/'runs/my run:/model:ro'",
        '--volume "$HOME"/.cache/x:/x',
        "--env 'A=b c'",
        "--env KEY",
        "i:1 serve",
        "/model",
        '--hf-overrides \'{"a": ["b"]}\'',
        "--flag",
    ]


def test_a_process_gets_the_same_words_with_whole_paths_and_a_name_to_remove_it_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    command = as_command(IN_DOCKER, container="c1")
    assert command[:6] == ["docker", "run", "--rm", "--init", "--name", "c1"]
    monkeypatch.setenv("PWD", str(tmp_path))
    shell = as_shell(IN_DOCKER).replace('"$PWD"', str(tmp_path)).replace('"$HOME"', "/home/me")
    assert shlex.split(shell.replace("\\\n", "")) == [word for word in command if word not in ("--name", "c1")]


def test_without_an_image_variables_come_before_the_program_and_none_shows_its_value() -> None:
    here = Deployment(
        program=(".venv/bin/python", "-m", "vllm"),
        environment={"N": "1"},
        passed=("KEY",),
        arguments=("--model", "x"),
        port=1,
    )
    assert as_shell(here) == 'KEY="$KEY" \\\n  N=1 \\\n  .venv/bin/python -m vllm \\\n  --model x'


def test_a_program_that_is_found_by_its_name_keeps_it() -> None:
    here = Deployment(program=("python",), arguments=(), port=1)
    assert as_command(here) == ["python"]


@pytest.mark.parametrize(("host", "alone"), [
    ("127.0.0.1", True), ("127.1.2.3", True), ("localhost", True), ("::1", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.5", False),
])  # fmt: skip
def test_only_loopback_needs_no_key(host: str, alone: bool) -> None:
    refuse_open_server(ServeSettings(host=host), has_key=True)
    without = pytest.raises(RecipeError, match=r"^serve.host: .*VLLM_API_KEY is not set")
    with contextlib.nullcontext() if alone else without:
        refuse_open_server(ServeSettings(host=host), has_key=False)


@pytest.mark.parametrize("word", ["--api-key=s3cret", "--api_key", "--api-k", "--host", "--hos=0.0.0.0", "--lora-mod"])
def test_what_would_go_round_that_check_is_refused_and_a_key_is_not_repeated(word: str) -> None:
    with pytest.raises(RecipeError, match=r"^serve.arguments: ") as caught:
        refuse_open_server(ServeSettings(arguments=("--seed", "1", word)), has_key=False)
    assert "s3cret" not in str(caught.value)


def test_other_arguments_are_the_users_own() -> None:
    refuse_open_server(ServeSettings(arguments=("--max-num-seqs", "8", "-tp", "2")), has_key=False)
