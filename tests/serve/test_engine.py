"""Which vLLM serves, by what command, in what environment."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.errors import CheckpointError, InputError, MachineError
from gemsmith.serve.settings import (
    ServeSettings,
    VllmEnvironment,
    check_imports,
    find_vllm,
    refuse_without_template,
    server_environment,
)
from gemsmith.serve.vllm_issues import ON_CPU


def test_a_missing_serving_environment_names_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEMSMITH_SERVE_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(
        MachineError, match=r"default of serve.python.*\.venv-serve/bin/python does not exist.*make serve-env"
    ):
        find_vllm()
    with pytest.raises(InputError, match=r"^serve.python: /nowhere does not exist"):
        find_vllm("/nowhere")


def test_a_python_without_vllm_is_refused(fake_vllm: Callable[..., Path]) -> None:
    fake_vllm(version="")
    with pytest.raises(MachineError, match=r"^\$GEMSMITH_SERVE_PYTHON: .* has no vLLM; make it with: make serve-env"):
        find_vllm()


def test_an_import_of_vllm_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr("gemsmith.serve.settings.IMPORT_S", 0.1)
    environment = VllmEnvironment(python=python, package="vllm", version="0.32.0")
    with pytest.raises(
        MachineError, match=r"cannot be imported \(still at it after 0.1 s\); make that environment again"
    ):
        check_imports(environment)


def engine(package: str, version: str = "0.32.0") -> VllmEnvironment:
    return VllmEnvironment(python=Path("/env/bin/python"), package=package, version=version)


def test_what_the_user_set_for_the_cpu_is_kept_and_our_packages_are_not_imported_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    environment = server_environment(engine("vllm-cpu"))
    assert environment["OMP_NUM_THREADS"] == "7" and environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["PYTHONPATH"] == ON_CPU and "PYTHONPATH" not in server_environment(engine("vllm"))
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment(engine("vllm"))


def test_a_chat_template_is_found_in_a_file_or_in_the_tokenizers_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no chat template.*data\.template"):
        refuse_without_template(tmp_path, ServeSettings())
    refuse_without_template(tmp_path, ServeSettings(chat_template="mine.jinja"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    refuse_without_template(tmp_path, ServeSettings())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    refuse_without_template(tmp_path, ServeSettings())
