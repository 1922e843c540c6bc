"""A training step compiled in a process of its own, within limits of time and memory.

One process compiles one step: libtpu reads its environment once, and CPU seconds and peak memory are the process's.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemsmith.aot.compiled import ENVIRONMENT, compile_step
from gemsmith.errors import GemsmithError, MachineError
from gemsmith.recipe import Recipe
from gemsmith.recipe_file import build_recipe
from gemsmith.sizing import Pictures, pictures_of
from gemsmith.zoo import find_variant

_POLL_S = 0.2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def compile_in_child(
    recipe: Recipe,
    folder: Path,
    *,
    topology: str,
    options: Mapping[str, Any] | None = None,
    pictures: Pictures | None = None,
    limit_s: float | None = None,
    limit_bytes: float | None = None,
) -> dict[str, Any]:
    """The facts of gemsmith.aot.compiled.CompiledStep but its text, which is in folder/step.hlo.

    `options`: XLA's flags; None: those that `gemsmith train` sets. `pictures`: what every row has room for. Raises
    MachineError with XLA's own words where it refuses the step, and where a limit is reached.
    """
    request: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "topology": topology, "options": options}
    if pictures is not None:
        request["pictures"] = {"images": pictures.images, "soft_tokens": pictures.soft_tokens}
    (folder / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "gemsmith.aot.child", str(folder)]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            _watch(child, limit_s=limit_s, limit_bytes=limit_bytes)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()
            last = next((line for line in reversed(lines) if line.strip()), f"exit code {child.returncode}")
            raise MachineError(last.removeprefix("error: "))
    facts: dict[str, Any] = json.loads((folder / "step.json").read_text())
    return facts


def _watch(child: "subprocess.Popen[bytes]", *, limit_s: float | None, limit_bytes: float | None) -> None:
    """Waits for the child's end. Raises MachineError where it takes longer or holds more than it may."""
    begin = time.monotonic()
    while child.poll() is None:
        if limit_s is not None and time.monotonic() - begin > limit_s:
            raise MachineError(f"compiling took more than {limit_s / 60:.3g} minutes, and was stopped")
        if limit_bytes is not None and (held := _held_bytes(child.pid)) > limit_bytes:
            raise MachineError(
                f"compiling held {held / 1e9:.1f} GB of {limit_bytes / 1e9:.1f} that it may, and was stopped"
            )
        time.sleep(_POLL_S)


def _held_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # it has just ended
        return 0


def main(folder: Path) -> None:
    """Compiles what folder/request.json asks for, into folder/step.hlo and folder/step.json."""
    request = json.loads((folder / "request.json").read_text())
    recipe, options = build_recipe(request["recipe"]), request["options"]
    if options is None:
        from gemsmith.train.tunix.xla import compiler_options

        options = compiler_options("tpu", recipe.train)
    pictures = None
    if "pictures" in request:
        pictures = pictures_of(recipe, find_variant(str(recipe.model)), **request["pictures"])
    compiled = compile_step(recipe, topology=request["topology"], options=options, pictures=pictures)
    step = dataclasses.asdict(compiled)
    (folder / "step.hlo").write_text(step.pop("text"))
    (folder / "step.json").write_text(json.dumps(step | {"options": options}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except GemsmithError as error:
        sys.exit(f"error: {error}")
