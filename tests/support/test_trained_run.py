import numpy as np
import pytest

from gemsmith.arch import find_variant, lora_targets
from gemsmith.checkpoints.peft import check_finite, check_fit
from support.trained_run import ALPHA, RANK, make_adapter, stacks_of

VARIANTS = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_made_adapter_fits_its_variant_and_changes_it(name):
    adapter = make_adapter(name)
    check_fit(adapter, lora_targets(find_variant(name)), source="made")
    check_finite(adapter, source="made", otherwise="make it again")
    assert (adapter.rank, adapter.alpha) == (RANK, ALPHA)
    assert all(np.abs(pair.b @ pair.a).max() > 0 for pair in adapter.modules.values())


def test_the_seed_decides_the_adapter():
    one, again, other = (make_adapter("tiny-31b", seed=seed) for seed in (1, 1, 2))
    for name, pair in one.modules.items():
        assert np.array_equal(pair.a, again.modules[name].a) and not np.array_equal(pair.a, other.modules[name].a)


@pytest.mark.parametrize("name", VARIANTS)
def test_stacks_hold_every_modules_matrices_once_transposed(name):
    adapter, variant = make_adapter(name), find_variant(name)
    left = set(adapter.modules)
    for number, words, a, b in stacks_of(adapter, name):
        for place, layer in enumerate(variant.stacks[number]):
            module = f"model.language_model.layers.{layer}.{'.'.join(words)}"
            left.remove(module)
            assert np.array_equal(a[place], adapter.modules[module].a.T)
            assert np.array_equal(b[place], adapter.modules[module].b.T)
    assert left == set()
