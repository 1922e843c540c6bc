import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Compiling is nearly all of these tests' time; without optimizations it takes half as long, and the numbers are as
    exact.

    For each module, since a folder without __init__.py is no package to pytest: it would last until the end of all
    tests.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
