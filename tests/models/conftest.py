import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_compiles():
    """Compiling is nearly all of these tests' time; without optimisations it takes half as long, and the numbers are as exact."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
