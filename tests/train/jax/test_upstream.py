"""What Qwix, Tunix, Orbax, JAX and Optax still do otherwise than training needs. Where a test fails, upstream has
changed: drop its row in docs/upstream.md, and the code that it names."""

import ast
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import qwix
import tensorboardX.writer
from flax import nnx
from jax._src import distributed
from jax._src.clusters import cloud_tpu_cluster
from tensorboardX.event_file_writer import EventFileWriter
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from gemsmith.train.jax import upstream

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


class Two(nnx.Module):
    """Two projections."""

    def __init__(self, dtype=jnp.float32):
        self.first = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
        self.second = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(1), dtype=dtype, param_dtype=dtype)

    def __call__(self, x):
        return self.second(self.first(x))


def adapt(model, **rule):
    rule = {"rank": 4, "alpha": 4.0, **rule}
    return qwix.apply_lora_to_model(
        model, qwix.LoraProvider(module_path=".*", **rule), jnp.ones((1, 16)), rngs=nnx.Rngs(params=0, dropout=1)
    )


def make_trainer(tmp_path=None, **config):
    model = adapt(Two())
    root = None if tmp_path is None else str(tmp_path / "checkpoints")
    trainer = PeftTrainer(
        model, optax.sgd(0.1), TrainingConfig(eval_every_n_steps=100, checkpoint_root_directory=root, **config)
    )
    trainer.with_loss_fn(lambda model, x: (model(x) ** 2).mean())
    return trainer


def test_qwix_drops_out_whenever_the_rule_has_a_rate():
    model = adapt(Two(), dropout=0.5)
    model.eval()
    with pytest.raises(ValueError, match="Cannot find rngs"):
        model(jnp.ones((1, 16)))


def test_qwix_gives_adapters_the_dtype_of_the_base():
    model = adapt(Two(jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))} == {jnp.dtype("bfloat16")}


def test_qwix_starts_a_wider_than_peft():
    start = np.abs(adapt(Two(), rank=64).first.kernel_lora_a[...])
    assert 0.95 * np.sqrt(6 / 16) < start.max() <= np.sqrt(6 / 16)


def test_qwix_gives_what_a_makes_no_name_for_remat():
    graph, state = nnx.split(adapt(Two()))
    traced = str(jax.make_jaxpr(lambda state: nnx.merge(graph, state)(jnp.ones((1, 16))))(state))
    assert traced.count("dot_general") == 6 and "name[" not in traced


def test_tunix_replays_the_data_when_it_resumes(tmp_path):
    batches = [{"x": jnp.full((2, 16), float(number))} for number in range(4)]
    read = []

    def rows():
        for number, batch in enumerate(batches):
            read.append(number)
            yield batch

    first = make_trainer(tmp_path, max_steps=2)
    first._pbar = _Silent()
    first.train(rows())
    read.clear()
    second = make_trainer(tmp_path, max_steps=4)
    assert second.train_steps == 2
    second._pbar = _Silent()
    second.train(rows())
    assert read[:2] == [0, 1]


class _Silent:
    def update_metrics(self, *_, **__):
        pass

    def update(self):
        pass

    def close(self):
        pass


def test_tunix_donates_the_optimizer_only():
    assert 'donate_argnames=("optimizer",)' in inspect.getsource(PeftTrainer.jit_train_and_eval_step)


def test_tunix_takes_the_exponential_of_every_loss():
    with pytest.warns(RuntimeWarning, match="overflow encountered in exp"):
        make_trainer().train([{"x": jnp.full((2, 16), 1e3)}] * 2)


def test_tunix_saves_a_step_whose_loss_is_no_number(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer._pbar = _Silent()
    trainer.train([{"x": jnp.full((2, 16), jnp.nan)}])
    assert (tmp_path / "checkpoints" / "1").exists()


def test_tunix_restores_moments_whole_onto_every_device():
    """It asks the variables' metadata for their sharding, and not the arrays."""
    assert "nnx.get_named_sharding(optimizer_state, named_sharding.mesh)" in inspect.getsource(
        CheckpointManager.maybe_restore
    )


def test_tunix_calls_an_unjitted_step_with_the_example_alone():
    """TunixTrainer.run relies on it."""
    source = inspect.getsource(PeftTrainer.train)
    assert "train_step(train_example)" in source
    assert make_trainer().jit_train_and_eval_step(skip_jit=True)[0].__name__ == "_train_step"


def test_tunix_clears_all_listeners():
    assert "jax.monitoring.clear_event_listeners()" in inspect.getsource(MetricsLogger.close)


def test_jax_says_how_many_hosts_a_slice_has(monkeypatch):
    """It has no public way to ask for it before jax.distributed.initialize."""
    assert (upstream.count_tpu_hosts(), upstream.tpu_host_number()) == (1, 0)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b,c,d")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "tpu,cpu")
    try:
        assert (upstream.count_tpu_hosts(), upstream.tpu_host_number()) == (8, 7)
        jax.config.update("jax_platforms", "cpu")
        assert (upstream.count_tpu_hosts(), upstream.tpu_host_number()) == (1, 0)
    finally:
        jax.config.update("jax_platforms", before)


JOINS = """
import jax
jax.distributed.initialize("localhost:9", 2, 1, initialization_timeout=1, cluster_detection_method="deactivate")
"""


@pytest.mark.slow
def test_jax_ends_the_process_where_the_first_host_is_not_there():
    """Where the exception could be caught, the exit code would be 1."""
    ended = subprocess.run([sys.executable, "-c", JOINS], capture_output=True, check=False, timeout=120)
    assert ended.returncode == -6


def test_tensorboardx_stays_open_after_a_close_that_failed(tmp_path, monkeypatch):
    writer = EventFileWriter(str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(writer, "flush", lambda: 1 / 0)
        writer.close()
    assert not writer._closed
    writer.close()


def test_jax_lets_nobody_say_what_is_done_about_a_lost_host():
    """Its client takes a callback, and calls it with a status that Python has no type for (0.10.2)."""
    assert "missed_heartbeat_callback" not in inspect.signature(jax.distributed.initialize).parameters


def test_jax_takes_sigterm_for_its_preemption_service():
    lines = [line.strip() for line in inspect.getsource(distributed).splitlines()]
    assert lines[lines.index("name='jax_enable_preemption_service',") + 1] == "default=True,"


def test_orbax_reads_the_metadata_of_all_steps_unless_told_not_to(tmp_path):
    root = tmp_path / "steps"
    with ocp.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave({"a": np.zeros(3)}))
        manager.wait_until_finished()
    (root / "1" / "_CHECKPOINT_METADATA").write_text("[]")
    with pytest.raises(ValueError, match="must be a dictionary"):
        ocp.CheckpointManager(root)
    options = ocp.CheckpointManagerOptions(lightweight_initialize=True)
    with ocp.CheckpointManager(root, options=options) as manager:
        assert manager.all_steps() == [1]


def test_orbax_has_hosts_wait_after_a_read():
    source = inspect.getsource(ocp.Checkpointer.restore)
    assert source.index("_restore(") < source.index("multihost.sync_global_processes(")
    assert "finally" not in source
    source = inspect.getsource(ocp.CheckpointManager._finalize)  # and of a save, where it has failed, too
    assert source.index("finally:") < source.index("_save_progress_tracker.set(False)")


def test_optax_clips_without_the_epsilon_of_torch():
    clip, gradient = optax.clip_by_global_norm(1e-3), jnp.array([2e-3])
    clipped = clip.update(gradient, clip.init(gradient))[0].item()
    assert clipped == pytest.approx(1e-3, rel=1e-6) and clipped != pytest.approx(2e-6 / (2e-3 + 1e-6), rel=1e-4)


def test_optax_corrects_adams_bias_less_exactly_than_torch():
    adam, gradient = optax.scale_by_adam(b1=0.9, b2=0.999, eps=0.0), jnp.array([1.0])
    direction = adam.update(gradient, adam.init(gradient))[0].item()
    assert 1e-6 < abs(direction - 1.0) < 1e-5


def test_tensorboardx_imports_torch():
    module = ast.parse(inspect.getsource(tensorboardX.writer))
    attempts = [node for block in module.body if isinstance(block, ast.Try) for node in block.body]
    assert "import torch" in map(ast.unparse, attempts)
