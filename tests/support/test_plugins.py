"""What the tests' plugin of JAX makes cheap."""

import os
import subprocess
import sys

import pytest

OPTIONS = """
import jax
from jax._src import compiler
client = jax.devices("cpu")[0].client
print(dict(compiler.get_compile_options(1, 1, backend=client).env_option_overrides))
"""


@pytest.mark.parametrize(("off", "expected"), [("true", False), ("false", None)])
def test_processes_that_tests_start_compile_without_fusion_emitters_where_most_optimizations_are_off(off, expected):
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": off}
    done = subprocess.run([sys.executable, "-c", OPTIONS], env=environment, capture_output=True, text=True, check=True)
    assert eval(done.stdout).get("xla_cpu_use_fusion_emitters") is expected
