"""What vLLM's OpenAI server is told, wherever it runs; and its command line on this machine as it is."""

from pathlib import Path

from gemsmith.checkpoint import read_config
from gemsmith.serve.adapter import lora_arguments, served_name
from gemsmith.serve.engine import Engine, ServeSettings
from gemsmith.serve.pictures import encoder_arguments, refuse_engine_without_torchvision
from gemsmith.serve.upstream import (
    CONTENT_AS_TEXT,
    CONTENT_IN_PARTS,
    PICTURES_EMBEDDED_ANEW,
    QUICK_START_ON_CPU,
    SERVER_MODULE,
)


def server_command(engine: Engine, folder: Path, name: str, port: int, settings: ServeSettings) -> list[str]:
    """The command line of vLLM's OpenAI server for a checkpoint folder, on this machine as it is.

    Raises RecipeError, CheckpointError or MachineError where pictures are wanted and cannot be had.
    """
    config = read_config(folder)
    if settings.pictures:
        refuse_engine_without_torchvision(engine, config)
    command = [str(engine.python), "-m", SERVER_MODULE, "--model", str(folder)]
    command += common_arguments(served_name(name, settings.adapter), settings, port=port, length=settings.max_model_len)
    if settings.chat_template is not None:
        command += ["--chat-template", settings.chat_template]
    if engine.is_cpu:
        command += QUICK_START_ON_CPU
    command += encoder_arguments(config, settings, is_cpu=engine.is_cpu)
    if settings.adapter is not None:
        command += lora_arguments(settings.adapter, name, is_cpu=engine.is_cpu)
    return [*command, *settings.arguments]


def common_arguments(name: str, settings: ServeSettings, *, port: int, length: int | None) -> list[str]:
    """What every server is told, wherever it is."""
    arguments = ["--served-model-name", name, "--host", settings.host, "--port", str(port)]
    arguments += [
        "--dtype",
        settings.dtype,
        "--seed",
        str(settings.seed),
        *(CONTENT_IN_PARTS if settings.pictures else CONTENT_AS_TEXT),
    ]
    arguments += ["--uvicorn-log-level", "warning"]
    arguments += [f"--{'' if settings.prefix_caching else 'no-'}enable-prefix-caching"]
    if settings.pictures and not settings.prefix_caching:
        # Without either cache vLLM knows a picture by its request alone, and embeds it anew.
        arguments += PICTURES_EMBEDDED_ANEW
    return arguments if length is None else [*arguments, "--max-model-len", str(length)]
