"""The repeated blocks that a variant's layers fall into."""

from dataclasses import replace

import pytest

from gemsmith.arch import VARIANTS, ScanBlocks, find_variant


def scans(variant):
    return [(blocks.first, blocks.period, blocks.repeats) for blocks in variant.scan_blocks]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma4-31b", [(0, 6, 10)]),
        ("gemma4-26b-a4b", [(0, 6, 5)]),
        ("gemma4-12b", [(0, 6, 8)]),
        ("gemma4-e4b", [(0, 6, 4), (24, 6, 3)]),
        ("gemma4-e2b", [(0, 5, 3), (15, 5, 4)]),
    ],
)
def test_published_variants_are_one_block_again_and_again(name, expected):
    assert scans(find_variant(name)) == expected


def test_an_irregular_end_is_a_block_of_its_own():
    variant = replace(find_variant("gemma4-31b"), layers=15)
    assert scans(variant) == [(0, 6, 2), (12, 3, 1)]
    assert [list(layers) for layers in variant.stacks] == [
        [0, 6],
        [1, 7],
        [2, 8],
        [3, 9],
        [4, 10],
        [5, 11],
        [12],
        [13],
        [14],
    ]


def test_a_block_in_which_sharing_of_kv_begins_stands_alone():
    variant = replace(find_variant("gemma4-e2b"), layers=15, kv_shared_layers=3)
    assert scans(variant)[0] == (0, 5, 2)
    for blocks in variant.scan_blocks:
        assert len({variant.shares_kv(layer) for layer in range(blocks.first, blocks.first + blocks.period)}) == 1


@pytest.mark.parametrize("name", VARIANTS)
def test_stacks_hold_every_layer_once_and_only_layers_of_one_kind(name):
    variant = find_variant(name)
    assert sorted(layer for layers in variant.stacks for layer in layers) == list(range(variant.layers))
    for layers in variant.stacks:
        kinds = {(variant.is_global(n), variant.shares_kv(n), variant.ffn_of(n), variant.has_v(n)) for n in layers}
        assert len(kinds) == 1
    assert all(isinstance(blocks, ScanBlocks) for blocks in variant.scan_blocks)
