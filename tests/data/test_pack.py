import hashlib
import time
from dataclasses import replace

import numpy as np
import pytest

from gemsmith.data.packing import ARRAYS, assign_rows, drawn_order, pack_rows
from gemsmith.data.tokenize import Rendered
from gemsmith.images.check import ImageInfo
from support.cases import each


def rendered(ids: list[int], trained: list[int]) -> Rendered:
    return Rendered(ids=np.array(ids, np.int32), trained=np.array(trained, bool), origin="here")


def test_two_documents_in_a_row_are_laid_out_as_the_module_says():
    documents = [rendered([2, 5, 6], [0, 1, 1]), rendered([2, 7], [1, 1])]
    [rows] = pack_rows(documents, [[0, 1]], 6)
    assert rows.tokens.tolist() == [[2, 5, 6, 2, 7, 0]]
    assert rows.segments.tolist() == [[1, 1, 1, 2, 2, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert rows.loss_mask.tolist() == [[0, 1, 1, 0, 1, 0]]
    assert {name: getattr(rows, name).dtype for name in ARRAYS} == ARRAYS


def test_best_fit_decreasing_fills_the_row_with_the_least_room():
    # 6 opens a row with 4 left, 5 another with 5 left; 4 fits the first exactly, 3 the second, 2 the second's rest, 1 a
    # new one.
    assert assign_rows([1, 2, 3, 4, 5, 6], 10) == [[5, 3], [4, 2, 1], [0]]


def test_documents_of_one_length_share_rows_as_the_order_has_them():
    """Class by class, as a folder of images is read, rows would be of one class."""
    assert assign_rows([3] * 6, 9) == [[0, 1, 2], [3, 4, 5]]
    assert assign_rows([3] * 6, 9, order=[5, 0, 3, 1, 4, 2]) == [[5, 0, 3], [1, 4, 2]]


def test_an_order_is_drawn_by_the_seed_alone_and_has_every_document_once():
    first, again, other = (drawn_order(200, seed) for seed in (0, 0, 1))
    assert first == again != other and sorted(first) == sorted(other) == list(range(200))
    assert first[:4] == [0, 124, 136, 148]  # on every machine and in every version


@each("seed", range(20))
def test_packing_loses_repeats_and_splits_nothing(seed):
    random = np.random.default_rng(seed)
    max_length = int(random.integers(8, 64))
    lengths = random.integers(1, max_length + 1, size=int(random.integers(1, 700)))
    documents = [
        rendered(random.integers(1, 99, size=length), random.integers(0, 2, size=length)) for length in lengths
    ]
    assigned = assign_rows(lengths.tolist(), max_length)
    assert sorted(index for row in assigned for index in row) == list(range(len(documents)))
    rows = list(pack_rows(documents, assigned, max_length))
    tokens, segments, positions, mask = (np.concatenate([getattr(part, name) for part in rows]) for name in ARRAYS)
    for row, members in enumerate(assigned):
        assert segments[row].max() == len(members)
        for segment, index in enumerate(members, start=1):
            place = np.flatnonzero(segments[row] == segment)
            assert np.array_equal(place, np.arange(place[0], place[0] + lengths[index]))
            assert np.array_equal(tokens[row, place], documents[index].ids)
            assert np.array_equal(positions[row, place], np.arange(lengths[index]))
            assert np.array_equal(mask[row, place], documents[index].trained & (np.arange(lengths[index]) > 0))
    padding = segments == 0
    assert not tokens[padding].any() and not mask[padding].any() and not positions[padding].any()
    assert np.count_nonzero(~padding) == lengths.sum()


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_within_best_fit_decreasings_bound_of_the_least_rows(seed):
    lengths = np.random.default_rng(seed).integers(1, 101, size=2000)
    least = -(-int(lengths.sum()) // 100)
    assert len(assign_rows(lengths.tolist(), 100)) <= 11 / 9 * least + 1


def test_packing_is_the_same_each_time():
    lengths = np.random.default_rng(0).integers(1, 50, size=500).tolist()
    assert assign_rows(lengths, 64) == assign_rows(lengths, 64)


def test_the_documents_of_a_row_are_found_again():
    [rows] = pack_rows([rendered([2, 5, 6], [0, 1, 1]), rendered([2, 7], [0, 1])], [[0, 1], [1], []], 6)
    assert [rows.documents(row) for row in range(len(rows))] == [[slice(0, 3), slice(3, 5)], [slice(0, 2)], []]
    assert rows.tokens[0][rows.documents(0)[1]].tolist() == [2, 7]


def test_rows_are_taken_in_any_order_with_padding_between():
    [rows] = pack_rows([rendered([2, 5], [0, 1]), rendered([2, 7], [0, 1])], [[0], [1]], 3)
    taken = rows.take([1, None, 0, 1])
    assert taken.tokens.tolist() == [[2, 7, 0], [0, 0, 0], [2, 5, 0], [2, 7, 0]]
    assert {name: array.dtype for name, array in taken.arrays().items()} == ARRAYS


def test_rows_of_text_alone_are_packed_into_the_same_bytes_as_ever():
    """The hash is version 0.1.0's, before rows could hold images."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, 257, 2000).tolist()
    documents = [rendered(random.integers(0, 999, length), random.integers(0, 2, length)) for length in lengths]
    total = hashlib.sha256()
    for chunk in pack_rows(documents, assign_rows(lengths, 256), 256):
        for array in chunk.arrays().values():
            total.update(array.tobytes())
    assert total.hexdigest() == "d93ecdcbe894467cef6e6a20f7de889d78b7205b66f2b0d4f9745ca462981c1b"


@pytest.mark.parametrize("seed", range(10))
def test_no_row_holds_more_patches_than_it_may_and_little_is_wasted(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 65, size=600)
    patches = np.where(random.random(600) < 0.5, 0, np.minimum(random.integers(1, 65, size=600), 64))
    rows = assign_rows(lengths.tolist(), 64, patches=patches.tolist(), max_patches=64)
    assert sorted(index for row in rows for index in row) == list(range(600))
    assert all(lengths[row].sum() <= 64 and patches[row].sum() <= 64 for row in rows)
    least = max(lengths.sum(), patches.sum()) / 64
    assert len(rows) <= 1.35 * least


def test_many_rows_full_of_patches_are_not_looked_through_again():
    lengths, patches = [20] * 20_000 + [10] * 20_000, [9] * 20_000 + [0] * 20_000
    begin_s = time.process_time()
    rows = assign_rows(lengths, 100, patches=patches, max_patches=18)
    assert len(rows) == 10_000 and time.process_time() - begin_s < 5


def test_the_images_of_a_row_are_those_of_its_documents_in_order():
    a, b = (ImageInfo(path=name, sha256="", width=1, height=1, soft_tokens=1) for name in "ab")
    documents = [replace(rendered([2, 7], [0, 1]), images=images) for images in ((a, b), (), (b,))]
    [rows] = pack_rows(documents, [[2, 0], [1]], 4)
    assert rows.images == ((b, a, b), ())
    assert rows.take([1, None, 0]).images == ((), (), (b, a, b))
    [plain] = pack_rows(documents[1:2], [[0]], 4)
    assert plain.images == () == plain.take([0, None]).images
