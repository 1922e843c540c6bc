"""The compiled step: made in a thread, so that SIGTERM is heard meanwhile, and kept on disk for the next start."""

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from gemsmith.files import expand_home
from gemsmith.recipe import Train
from gemsmith.signals import leave
from gemsmith.train.attempt import Stop
from gemsmith.train.tunix.step import Step
from gemsmith.train.tunix.xla import Option, compiler_options, explain_refusal

_LARGEST_CACHE_BYTES = 10 * 2**30
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step that takes the arguments of `Step.update`, and how it came about."""

    update: Any
    seconds: float
    from_cache: bool


def use_compile_cache() -> None:
    """Lets JAX keep compiled programs in ~/.cache/gemsmith/compiled, unless JAX_COMPILATION_CACHE_DIR is set.

    GEMSMITH_CACHE moves ~/.cache/gemsmith, JAX_ENABLE_COMPILATION_CACHE=false turns it off. The oldest programs go when
    they take more than 10 GiB.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = expand_home(os.environ.get("GEMSMITH_CACHE", "~/.cache/gemsmith")) / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _LARGEST_CACHE_BYTES)


def compile_step(step: Step, inputs: dict[str, jax.ShapeDtypeStruct], stop: Stop, train: Train) -> Compiled | None:
    """The step, compiled for these inputs; None where `stop` was set first.

    Raises InputError where XLA does not take a flag of the recipe's, or one of Gemsmith's own.
    """
    begin_s, platform = time.monotonic(), jax.default_backend()
    flags = compiler_options(platform, train)
    work = _Work(step, inputs, flags)
    # XLA cannot be told to stop, and the interpreter's end would crash under it: the process leaves from there without
    # an end.
    atexit.register(_leave, work, stop)
    with _cache_hits() as hits:
        work.start()
        while not work.ended.wait(_POLL_S):
            if stop.is_set():
                return None
    atexit.unregister(_leave)
    if work.error:
        raise explain_refusal(work.error, flags, train, platform=platform) or work.error
    return Compiled(update=work.result, seconds=time.monotonic() - begin_s, from_cache=bool(hits))


class _Work(threading.Thread):
    def __init__(self, step: Step, inputs: dict[str, jax.ShapeDtypeStruct], options: dict[str, Option]) -> None:
        super().__init__(daemon=True)
        self._options = options
        self._arguments = (step.update, step.trained, step.moments, step.frozen, inputs)
        self.ended, self.result = threading.Event(), None
        self.error: Exception | None = None

    def run(self) -> None:
        update, *arguments = self._arguments
        try:
            self.result = update.lower(*arguments).compile(compiler_options=self._options)
        except Exception as error:  # noqa: BLE001 - whoever waits raises it again
            self.error = error
        finally:
            self.ended.set()


def _leave(work: _Work, stop: Stop) -> None:
    if not work.ended.is_set():
        leave(128 + stop.number if stop.is_set() else 130)


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """One entry for each program that JAX takes from its cache while the block runs."""
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)
