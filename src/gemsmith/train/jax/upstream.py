"""What stands here for what Qwix, Tunix and JAX do otherwise than training needs; docs/upstream.md says until when."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax._src.clusters.cloud_tpu_cluster import BaseTpuCluster, GceTpuCluster, GkeTpuCluster
from jax.ad_checkpoint import checkpoint_name
from qwix._src.providers.lora import LoraProvider, LoraRule
from qwix._src.utils import flax_util
from tunix.sft import hooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from gemsmith.recipe.backends import LORA


@jax.custom_vjp
def fused_lora_matmul(x: jax.Array, u: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """The sum x W + u B, (..., out), of x (..., in), u (..., R), W (in, out) and B (R, out), rounded once."""
    both = jax.lax.optimization_barrier(jnp.concatenate([x, u], axis=-1))  # (..., in + R)
    return both @ jnp.concatenate([w, b], axis=0)  # (..., in + R) @ (in + R, out)


def _backward(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of the two matmuls: fused, that of [x, u] would be split again. XLA drops W's own where unused."""
    x, u, w, b = saved
    of_matrices = (jnp.einsum("...i,...o->io", side, gradient) for side in (x, u))  # (in, out), (R, out)
    return gradient @ w.T, gradient @ b.T, *of_matrices


fused_lora_matmul.defvjp(lambda *saved: (fused_lora_matmul(*saved), saved), _backward)


def count_tpu_hosts() -> int:
    """The hosts of the TPU slice that this machine belongs to, 1 elsewhere."""
    cluster = _tpu_cluster()
    return cluster.get_process_count() if cluster else 1


def tpu_host_number() -> int:
    """Which host of its TPU slice this machine is, from 0; 0 elsewhere."""
    cluster = _tpu_cluster()
    return cluster.get_process_id() if cluster else 0


def _tpu_cluster() -> type[BaseTpuCluster] | None:
    if "tpu" not in (jax.config.values["jax_platforms"] or "tpu"):
        return None
    return next((cluster for cluster in (GkeTpuCluster, GceTpuCluster) if cluster.is_env_present()), None)


class DropoutKey(nnx.Variable):
    """The random keys of one module's dropout in one step, one for each row."""


class FixedRngs(nnx.Rngs):
    """Gives the same keys whenever asked, so that a recomputed forward pass draws the same masks."""

    def __init__(self, key: jax.Array) -> None:
        self.key = DropoutKey(key)

    def __getitem__(self, name: str) -> Callable[[], jax.Array]:
        return lambda: self.key[...]


class LoraProviderWithDropout(LoraProvider):
    """Qwix's LoRA with dropout only in modules that have a key, and a name for what A makes, for remat.

    `fuses`: where the result is wider than the input, projection and adapter are one matmul.
    """

    def __init__(self, rules: Sequence[LoraRule], *, fuses: bool) -> None:
        super().__init__(rules)
        self._fuses = fuses

    def _get_current_rule_and_op_id(self, op_name: str, **options: Any) -> tuple[Any, Any]:
        rule, op_id = super()._get_current_rule_and_op_id(op_name, **options)
        if isinstance(rule, LoraRule) and not isinstance(flax_util.get_current_module().qwix_rngs, FixedRngs):
            rule = dataclasses.replace(rule, dropout=0.0)
        return rule, op_id

    def dot_general(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *others: Any, **options: Any
    ) -> jax.Array:
        """The product lhs · kernel with the module's adapter; upstream's where the module has none yet."""
        module = flax_util.get_current_module()
        if not hasattr(module, "kernel_lora_a"):
            return super().dot_general(lhs, rhs, dimension_numbers, *others, **options)
        rule, _ = self._get_current_rule_and_op_id("dot_general")
        a, b = module.kernel_lora_a[...], module.kernel_lora_b[...]
        seen = _drop_out(lhs, module.qwix_rngs.key[...], rule.dropout) if rule.dropout else lhs
        inner, scale = checkpoint_name(seen @ a, LORA), rule.alpha / rule.rank
        alike = {array.dtype for array in (lhs, rhs, a, b)} == {lhs.dtype}
        if self._fuses and alike and rhs.shape[1] > rhs.shape[0]:
            return fused_lora_matmul(lhs, inner * scale, rhs, b)
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, *others, **options) + inner @ b * scale


def _drop_out(x: jax.Array, keys: jax.Array, rate: float) -> jax.Array:
    """The x (B, L, in) with a share of its values zero, by one key for each row, and the others larger by as much."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - rate), 0)


def set_dropout(model: nnx.Module, keys: Mapping[tuple[str | int, ...], jax.Array]) -> None:
    """Turns dropout on in the adapted modules at these paths, each with the keys of the rows, (B,)."""
    for path, of_rows in keys.items():
        flax_util.get_value_from_path(model, path).qwix_rngs = FixedRngs(of_rows)


class TunixTrainer(PeftTrainer):
    """Tunix's loop with our compiled step, data by the step's number, and checkpoints that check first."""

    def __init__(self, model: nnx.Module, transformation: optax.GradientTransformation) -> None:
        config = TrainingConfig(eval_every_n_steps=1, checkpoint_root_directory=None, max_steps=None)
        super().__init__(model, transformation, config)
        self._pending: list[Any] = []

    def start_at(self, step: int) -> None:
        self._train_steps = self._iter_steps = step

    def run(
        self,
        *,
        update: Callable[[Any], tuple[Any, Any]],
        finish: Callable[[Any], None],
        evaluate: Callable[[int], None],
        load: Callable[[int], Any],
    ) -> None:
        """Trains until the data ends, which `load` gives by the step's number, then saves the last step.

        `update` returns a step's metrics and what `finish` takes once the device is done. `evaluate` is called with the
        step's number after each update, before the step is saved.
        """
        self._run_update, self._finish, self._evaluate = update, finish, evaluate
        self.with_data_hooks(_DataByStep(load))
        # skip_jit: upstream then calls what create_train_step_fn returns with the example alone; ours is compiled.
        self.train((), skip_jit=True)

    def create_train_step_fn(self) -> Callable[..., Any]:
        def update(example: Any) -> tuple[Any, None, Any]:
            metrics, pending = self._run_update(example)
            self._pending.append(pending)
            self.finish_steps(but=1)
            self._evaluate(self.train_steps + 1)
            return metrics["loss"], None, metrics["grad_norm"]

        return update

    def _buffer_metrics(self, *_: Any, **__: Any) -> None:
        """Leaves upstream without metrics to write."""

    def finish_steps(self, *, but: int = 0) -> None:
        """Waits for the steps under way, but for the newest `but`, and hands on their metrics."""
        while len(self._pending) > but:
            self._finish(self._pending.pop(0))

    def close(self) -> None:
        self.finish_steps()
        super().close()


class _DataByStep(hooks.DataHooks):
    def __init__(self, load: Callable[[int], Any]) -> None:
        self._load = load

    def load_next_train_batch(self, train_ctx: Any) -> Any:
        return self._load(train_ctx.train_steps + 1)

    def load_next_eval_batch(self, train_ctx: Any) -> Any:  # noqa: ARG002 - Tunix's signature
        return None
