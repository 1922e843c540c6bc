"""How a model is split over a machine's devices while it is served."""

import pytest

from gemsmith.arch import VARIANTS, find_variant
from gemsmith.errors import MachineError
from gemsmith.hardware import load_catalog
from gemsmith.serve.command import UTILIZATION, choose_layout, memory_reason, tensor_parallel_reason
from gemsmith.serve.settings import ServeSettings

MACHINES = load_catalog().machines
ONE_SMALL_CHIP = ("1xl4", "v6e-1")
SERVING = [name for name, machine in MACHINES.items() if machine.chip.kind != "cpu" and machine.hosts == 1]


def split(machine: str, model: str, length: int = 16_896, **settings):
    return choose_layout(MACHINES[machine], find_variant(model), ServeSettings(**settings), length)


@pytest.mark.parametrize(("machine", "model", "expected"), [
    ("1xh100", "gemma4-31b", (1, 1, "bfloat16", 4096)),
    ("2xh100", "gemma4-31b", (2, 1, "bfloat16", 8192)),
    ("8xh100", "gemma4-31b", (4, 2, "bfloat16", 8192)),
    ("8xh100", "gemma4-26b-a4b", (2, 4, "bfloat16", 8192)),
    ("2xh100", "gemma4-12b", (1, 2, "bfloat16", 8192)),
    ("g4-standard-48", "gemma4-31b", (1, 1, "bfloat16", 8192)),
    ("v6e-8", "gemma4-31b", (8, 1, "bfloat16", 8192)),
    ("v5e-4", "gemma4-31b", (4, 1, "fp8", 8192)),
    ("tpu7x-4", "gemma4-31b", (8, 1, "bfloat16", 8192)),
])  # fmt: skip
def test_each_machine_has_its_split(machine: str, model: str, expected: tuple[int, int, str, int]) -> None:
    found = split(machine, model)
    assert (found.tp, found.copies, found.weight_dtype, found.batched_tokens) == expected


@pytest.mark.parametrize("model", [name for name in VARIANTS if name.startswith("gemma4")])
def test_no_split_is_one_that_vllm_refuses_or_that_does_not_fit(model: str, subtests: pytest.Subtests) -> None:
    assert len(SERVING) > 20
    for machine in SERVING:
        with subtests.test(machine):
            check_split(machine, model)


def check_split(machine: str, model: str) -> None:
    if machine in ONE_SMALL_CHIP and model in ("gemma4-26b-a4b", "gemma4-31b"):
        with pytest.raises(MachineError, match=r"lower serve\.max_model_len, or name a larger machine"):
            split(machine, model)
        return
    found, variant = split(machine, model), find_variant(model)
    assert variant.heads % found.tp == 0 and found.tp * found.copies == MACHINES[machine].devices
    for heads in (variant.kv_heads, variant.global_kv_heads):
        assert heads % found.tp == 0 or found.tp % heads == 0
    chip = MACHINES[machine].chip
    assert found.memory.total <= UTILIZATION * chip.hbm_bytes / chip.devices


def test_fp8_is_for_weights_that_do_not_fit_and_no_others() -> None:
    assert split("1xh100", "gemma4-31b", 65_536).weight_dtype == "fp8"
    assert split("1xh100", "gemma4-31b", 65_536, kv_cache_dtype="fp8").weight_dtype == "bfloat16"
    assert split("2xh100", "gemma4-12b", dtype="float32").weight_dtype == "float32", "what was asked for stays"


def test_what_fits_in_no_way_is_one_line_with_numbers() -> None:
    expected = r"--machine 1xh100: gemma4-31b needs \d+\.\d GB a device with float32 weights .*72\.0 may be used; lower"
    with pytest.raises(MachineError, match=expected):
        split("1xh100", "gemma4-31b", dtype="float32")


def test_the_reasons_name_heads_and_bytes() -> None:
    variant, machine = find_variant("gemma4-31b"), MACHINES["v6e-8"]
    found = split("v6e-8", "gemma4-31b")
    assert "2 hold each of 4" in tensor_parallel_reason(machine, variant, found)
    assert "of 30.2 that vLLM may use" in memory_reason(machine, found)
    two = tensor_parallel_reason(MACHINES["2xh100"], variant, split("2xh100", "gemma4-31b"))
    assert two == "divides the 16 kv heads and 4 global ones of gemma4-31b"
