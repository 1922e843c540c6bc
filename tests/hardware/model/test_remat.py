from dataclasses import replace

import pytest

from gemsmith.arch import find_variant
from gemsmith.hardware.model import choose_remat, memory_of, step_cost
from gemsmith.hardware.model.memory import ORDER
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Mesh

GIB = 2**30


def work(rows=4, model="gemma4-31b", **train):
    values = {
        "checkpoint": "x",
        "data": {"train": "x", "max_length": 4096},
        "train": {"global_batch_size": rows, **train},
    }
    return step_cost(build_recipe(values), find_variant(model), attention="flash")


def choose(gib, rows=4, fsdp=4, **train):
    return choose_remat(work(rows, **train), Mesh(fsdp=fsdp), device_bytes=gib * GIB)


def test_a_large_chip_keeps_every_name_and_a_small_one_what_saves_most():
    assert choose(95.7) == ORDER
    assert choose(31.2, rows=8, fsdp=8) == ("lora", "down", "o", "attended")
    assert choose(16) == "layer"


@pytest.mark.parametrize("gib", [24, 31.2, 40, 60, 80, 95.7])
def test_what_is_chosen_fits_and_more_memory_never_keeps_less(gib):
    kept, more = choose(gib), choose(gib + 10)
    assert memory_of(replace(work(), remat=kept), Mesh(fsdp=4)).total <= 0.8 * gib * GIB or kept == "layer"
    assert len(more) >= len(kept) or kept == "layer"


def test_what_waits_in_the_hosts_memory_is_not_kept_twice():
    assert choose(95.7, offload=["gate", "up"]) == tuple(name for name in ORDER if name not in ("gate", "up"))


def test_a_base_of_four_bits_leaves_room_for_more():
    assert choose(24) == "layer" and "lora" in choose(24, dtype="nf4")


@pytest.mark.parametrize(
    ("model", "keys", "inputs"),
    [
        ("gemma4-31b", {"remat": ["o", "down"]}, 10),
        ("gemma4-12b", {"remat": ["o", "down", "gate"]}, 8),
        ("gemma4-e4b", {"remat": ["o", "down"]}, 42),
        ("gemma4-31b", {"remat": ["down", "lora"]}, 60),
        ("gemma4-31b", {"remat": "layer"}, 60),
        ("gemma4-31b", {"remat": ["o", "down"], "dtype": "nf4"}, 60),
        ("gemma4-26b-a4b", {"remat": ["o", "down"]}, 30),
    ],
)
def test_of_layers_that_make_their_inputs_again_only_the_blocks_are_kept(model, keys, inputs):
    assert work(model=model, **keys).saved_inputs == inputs
