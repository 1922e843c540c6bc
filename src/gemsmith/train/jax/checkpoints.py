"""Saved steps of the JAX backend: Tunix's, with checksums, and read on every host; see docs/upstream.md for why.

Checksums are computed on the arrays' devices: only eight bytes of each tensor leave them.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from tunix.sft.checkpoint_manager import CheckpointManager

from gemsmith.checkpoints import steps as saved_steps
from gemsmith.errors import CorruptCheckpointError
from gemsmith.runs.run import Run
from gemsmith.system.signals import heard_later
from gemsmith.train.jax.distributed import holds_on_all_hosts


def checksums(state: nnx.State) -> dict[str, str]:
    """Path of each array, as Orbax names it -> its checksum, the same on every mesh. All hosts must ask."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        split = isinstance(leaf.sharding, NamedSharding)
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec()) if split else None
        # One at a time: of several programs under way at once, XLA's devices on CPU may wait for another to join in.
        sums = jax.device_get(_summing(everywhere)(leaf))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = saved_steps.write_checksum(leaf.dtype, leaf.shape, sums)
    return found


@cache
def _summing(sharding: NamedSharding | None) -> Any:
    return jax.jit(_sums, out_shardings=sharding)


def _sums(array: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    # From an index of each axis: to flatten the array would move its parts between devices.
    place, stride = jnp.zeros(array.shape, jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * np.uint32(stride % 2**32)
        stride *= array.shape[axis]
    mixed = saved_steps.mix(bits, place)
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(saved_steps.weigh(mixed, place), dtype=jnp.uint32)])


class OrbaxCheckpoints(CheckpointManager):
    """Tunix's checkpoints, saved with what `before_save` returns once it has agreed.

    `after_save` is told the seconds since then, and the bytes of the arrays: 0 where the step was there already. They
    are `<root>/<step>/{model_params,optimizer_state}`. A step's metadata holds checksums of its arrays, too, and a step
    that does not match them is not restored. The best step is saved, too, and stays beside the newest. Where all
    weights are trained and a step is read, the present arrays make room first, and are gone where it is damaged.
    """

    def __init__(
        self,
        run: Run,
        *,
        best_step: Callable[[], int | None],
        before_save: Callable[[], dict[str, Any]],
        after_save: Callable[[float, int], None],
    ) -> None:
        root, self._train = run.checkpoints, run.recipe.train
        # Lightweight: it would read every step's metadata, and end at one that is damaged.
        options = ocp.CheckpointManagerOptions(
            save_interval_steps=self._train.save_steps,
            preservation_policy=self,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            # Of folders that a full disk refuses, threads would wait 20 minutes to be told that they are there.
            async_options=ocp.options.AsyncOptions(
                barrier_sync_fn=_wait_for_all_hosts, create_directories_asynchronously=False
            ),
        )
        self._root = epath.Path(root if "://" in str(root) else root.absolute())
        super().__init__(root_directory=str(self._root), options=options)
        self._best_step, self._before_save, self._after_save = best_step, before_save, after_save

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> list[bool]:
        """Which steps stay, as Orbax asks its policy."""
        newest, best = len(checkpoints) - self._train.save_total_limit, self._best_step()
        return [place >= newest or each.step == best for place, each in enumerate(checkpoints)]

    def save(self, step: int, model: Any, optimizer: Any = None, *args: Any, force: bool = False, **more: Any) -> bool:
        """Whether the step was saved; nothing is, before the first step."""
        if step == 0 or not (force or step == self._best_step() or self._checkpoint_manager.should_save(step)):
            return False
        metadata, begun_s = self._before_save(), time.monotonic()
        states = _states(model, optimizer)
        sums = {name: checksums(state) for name, state in states.items()}
        more["custom_metadata"] = saved_steps.add_checksum(metadata, sums)
        with heard_later():
            saved = super().save(step, model, optimizer, *args, force=True, **more)
        size_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(states)) if saved else 0
        self._after_save(time.monotonic() - begun_s, size_bytes)
        return saved

    def steps(self) -> list[int]:
        return sorted(self._checkpoint_manager.all_steps())

    def others(self) -> list[int]:
        last = [(step, self._root / str(step)) for step in self.steps()[-1:]]
        with contextlib.suppress(CorruptCheckpointError):  # that is told once the step is to be restored
            return [step for step, folder in last if saved_steps.is_peft_step(folder) or not self.read_metadata(step)]
        return []

    def read_metadata(self, step: int) -> dict[str, Any]:
        return saved_steps.read_step_metadata(self._root / str(step))

    def read(self, step: int, model: Any, optimizer: Any) -> dict[str, Any]:
        """A step's arrays, placed where the model's and the optimizer's are. Raises CorruptCheckpointError."""
        metadata, states = self.read_metadata(step), _states(model, optimizer)
        for leaf in jax.tree.leaves(states) if self._train.method == "full" else ():
            leaf.delete()
        folder = self._root / str(step)
        restored = _read_on_all_hosts(lambda: {name: _restore(folder / name, state) for name, state in states.items()})
        for name, state in restored.items():
            saved_steps.compare_checksums(metadata, name, checksums(state))
        return restored

    def delete_all(self) -> None:
        for step in self._checkpoint_manager.all_steps():
            self._checkpoint_manager.delete(step)

    def set_aside(self, step: int) -> str:
        name = saved_steps.set_aside(self._root / str(step), writes=jax.process_index() == 0)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("set aside")  # not by name: one that looks late finds another free
        self._checkpoint_manager.reload()
        return name

    def wait(self) -> None:
        """Returns once every save that was begun is complete."""
        self._checkpoint_manager.wait_until_finished()


def _wait_for_all_hosts(*, key: str, timeout_ms: int) -> None:
    """Orbax's own barrier. A host whose save has failed passes it: the others wait at the one before."""
    if sys.exception() is None:
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _states(model: Any, optimizer: Any) -> dict[str, Any]:
    """What a step consists of, by the names of Tunix's folders."""
    return {"model_params": nnx.state(model, nnx.LoRAParam), "optimizer_state": nnx.state(optimizer, nnx.OptState)}


def _restore(folder: epath.Path, state: Any) -> Any:
    # The handler, not a Checkpointer: after that one's read hosts wait for each other, also for one that has failed.
    arguments = ocp.args.PyTreeRestore(item=state, restore_args=ocp.checkpoint_utils.construct_restore_args(state))
    return ocp.PyTreeCheckpointHandler().restore(folder, args=arguments)


def _read_on_all_hosts(read: Callable[[], Any]) -> Any:
    """What `read` returns. Raises CorruptCheckpointError on every host where a step cannot be read on one."""
    result, reason = None, ""
    try:
        # JAX's own errors are of the machine, not of the files.
        result = saved_steps.read_or_damage(read, but=jax.errors.JaxRuntimeError)
    except CorruptCheckpointError as error:
        reason = str(error)
    if not holds_on_all_hosts(not reason):
        reason = reason or "another host cannot read it"
    if reason:
        raise CorruptCheckpointError(reason)
    return result
