import numpy as np
import pytest

from gemsmith.checkpoints.steps import checksum


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint32", "uint8", "bool"])
def test_one_flipped_bit_changes_both_halves(dtype):
    random = np.random.default_rng(0)
    array = random.integers(0, 2, (3, 5, 7)).astype(dtype)
    before = checksum(array).split()[1]
    for _ in range(200):
        changed = array.copy()
        words = changed.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
        words[random.integers(words.size)] ^= 1 << int(
            random.integers(1 if dtype == "bool" else 8 * array.dtype.itemsize)
        )
        after = checksum(changed).split()[1]
        assert after[:8] != before[:8] and after[8:] != before[8:]


@pytest.mark.parametrize(
    "other",
    [lambda x: x[::-1], lambda x: -x, lambda x: np.roll(x, 1), lambda x: x.reshape(4, 2), lambda x: x.view("int32")],
)
def test_the_same_values_in_other_places_shapes_or_types_are_others(other):
    array = np.array([1.0, -1.0, 0.0, 2.0, 3.0, 3.0, 5.0, -0.0], np.float32)
    assert checksum(other(array)) != checksum(array)


def test_it_names_type_and_shape_and_stays_what_it_is():
    """Steps that were saved before must still match."""
    assert checksum(np.arange(6, dtype=np.float32).reshape(2, 3)) == "float32[2,3] 70deab94b91d850a"
    assert checksum(np.uint32(7)) == "uint32[] 18c9aec418c9aec4"


def test_a_large_array_is_the_sum_of_its_pieces(monkeypatch):
    array = np.random.default_rng(0).standard_normal((50, 70)).astype(np.float32)
    whole = checksum(array)
    monkeypatch.setattr("gemsmith.checkpoints.steps._VALUES_AT_ONCE", 64)
    assert checksum(array) == whole
