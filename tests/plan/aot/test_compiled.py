import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import MachineError
from gemsmith.hardware import load_catalog
from gemsmith.hardware.model import step_cost
from gemsmith.plan.aot.compile import ENVIRONMENT, check_compiler
from gemsmith.plan.aot.timeline import walk
from gemsmith.recipe.load import build_recipe

pytestmark = pytest.mark.usefixtures("optimized_compiles")

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "tpu_compile.py"
GOLDEN = Path(__file__).parent / "golden" / "scan_v5p.hlo"

# A process of its own: libtpu and JAX read their environment once.
SCRIPT = """
import json, sys
from gemsmith.plan.aot.compile import compile_for, open_topology
devices = open_topology("v5p:2x2x1")
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(devices), ("fsdp",))
def shape(*sizes, spec):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
lowered = jax.jit(jnp.matmul).lower(shape(4 * 4096, 16384, spec=P("fsdp")), shape(16384, 16384, spec=P()))
step = compile_for(lowered, {}) | {"coordinates": [device.coords for device in devices]}
json.dump(step, sys.stdout)
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_program_is_compiled_for_a_slice_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)
    assert step["argument_bytes"] == 2 * (4096 * 16384 + 16384**2)
    assert step["output_bytes"] == 2 * 4096 * 16384 and 0 < step["compile_cpu_s"] < 60
    assert step["coordinates"] == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]]
    # What one chip takes for 4096 x 16384 x 16384: 5.13 ms, 93 % of the peak.
    costs = walk(step["text"], load_catalog().chips["v5p"])
    assert costs.step_high_s == pytest.approx(5.13e-3, rel=0.01)
    assert costs.flops("matmul") == 2 * 4096 * 16384**2


GATHERS = """
import sys
from gemsmith.plan.aot.compile import compile_for, open_topology
from gemsmith.recipe.schema import Train
from gemsmith.train.jax.compile import compiler_options
devices = open_topology(sys.argv[1])
import jax, jax.numpy as jnp, numpy as np
from jax.lax import with_sharding_constraint as place
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(devices), ("fsdp",))
whole, split = (NamedSharding(mesh, spec) for spec in (P(), P("fsdp")))
def layers(x, weights):
    for w in weights:
        x = place(jnp.maximum(x @ place(w, whole), 0), split)
    return x
def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=split)
lowered = jax.jit(layers).lower(shape(len(devices) * 1024, 8192), [shape(8192, 8192)] * 3)
print(compile_for(lowered, compiler_options("tpu", Train()))["text"])
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("topology", "who", "other"),
    [
        ("v5p:2x2x1", 'async_execution_thread="sparsecore"', "AsyncCollectiveStart"),
        ("v6e:2x4", 'async_execution_thread="sparsecore"', "AsyncCollectiveStart"),
        ("v5e:2x4", "AsyncCollectiveStart", 'async_execution_thread="sparsecore"'),
    ],
)
def test_the_sparse_cores_gather_where_there_are_any_else_the_matmuls_programs(topology, who, other):
    command = [sys.executable, "-c", GATHERS, topology]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(who) >= 2 and other not in done.stdout


def test_without_libtpu_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"pip install --no-deps -r requirements/tpu\.lock"):
        check_compiler()


def test_model_flops_are_those_that_no_recomputing_adds_to(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    model_flops = runpy.run_path(str(BENCHMARK))["model_flops"]
    values = {
        "checkpoint": "x",
        "data": {"train": "x", "max_length": 4096},
        "train": {"global_batch_size": 4},
        "lora": {"rank": 64},
    }
    flops = model_flops(step_cost(build_recipe(values), find_variant("gemma4-31b")))
    # 4 for each of the 30.7e9 weights and a token; adapters and attention add a tenth.
    assert 1.0 < flops / (4 * 30.7e9 * 4 * 4096) < 1.15


@pytest.mark.slow
def test_the_benchmark_walks_a_compiled_text():
    command = [sys.executable, str(BENCHMARK), "--walk", str(GOLDEN), "--chip", "v5p", "--top", "3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "splash_mha_fwd" in printed and "with collectives hidden" in printed


@pytest.mark.slow
def test_the_benchmark_names_its_cases():
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--case", "31b-v9"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "31b-v5p" in done.stderr
