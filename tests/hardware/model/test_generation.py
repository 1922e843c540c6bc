"""Rooflines of serving, against what can be counted by hand."""

from dataclasses import replace

import pytest

from gemsmith.arch import find_variant
from gemsmith.hardware import load_catalog
from gemsmith.hardware.model.serving import Served, decode_step, kv_bytes, least_token_s, prefill, weights_bytes

MACHINES = load_catalog().machines


def served(model: str = "gemma4-31b", machine: str = "1xh200", tp: int = 1, dtype: str = "bfloat16") -> Served:
    return Served(
        variant=find_variant(model), machine=MACHINES[machine], tp=tp, weight_dtype=dtype, kv_dtype="bfloat16"
    )


def test_one_request_reads_the_weights_and_its_keys_and_values():
    one = served()
    read = weights_bytes(one.variant, "bfloat16") + kv_bytes(one.variant, 1, "bfloat16", 1000)
    assert decode_step(one, requests=1, context=1000).hbm_s == pytest.approx(read / 4800e9)
    assert decode_step(one, requests=1, context=1000).interconnect_s == 0


def test_of_experts_more_requests_touch_more():
    """26B-A4B: one token meets 8 of 128 experts, many tokens nearly all."""
    model = served("gemma4-26b-a4b")
    whole = weights_bytes(model.variant, "bfloat16") / 4800e9
    one, many = (decode_step(model, requests=requests, context=1).hbm_s for requests in (1, 256))
    assert one < 0.35 * whole and 0.99 * whole < many < 1.1 * whole


def test_a_prompt_is_two_operations_a_weight_beside_attention():
    one = served()
    head = one.variant.vocabulary * one.variant.embed_dim
    least = 2 * 1000 * (30.697e9 - head) / 989.5e12
    assert least < prefill(one, 1000).matmul_s < 1.05 * least


def test_devices_of_tensor_parallel_share_work_and_send_each_other_sums():
    one, two = served(machine="2xh100"), served(machine="2xh100", tp=2)
    alone, shared = (prefill(each, 4096) for each in (one, two))
    assert shared.matmul_s == alone.matmul_s / 2 and shared.interconnect_s > alone.interconnect_s == 0
    # 60 layers, two sums of 4096 x 5376 bfloat16 numbers.
    assert shared.interconnect_s == pytest.approx(60 * 2 * 4096 * 5376 * 2 / 450e9)


def test_fp8_reads_fewer_bytes_and_per_layer_embeddings_are_looked_up():
    assert (
        decode_step(served(dtype="fp8"), requests=1, context=1).hbm_s
        < 0.6 * decode_step(served(), requests=1, context=1).hbm_s
    )
    e2b = served("gemma4-e2b")
    assert decode_step(e2b, requests=1, context=1).hbm_s < 0.6 * weights_bytes(e2b.variant, "bfloat16") / 4800e9


def test_a_chip_of_two_devices_has_half_of_its_speed_in_each():
    machine = MACHINES["tpu7x-4"]
    one = Served(variant=find_variant("gemma4-e2b"), machine=machine, tp=1, weight_dtype="bfloat16", kv_dtype="fp8")
    single = replace(machine, chip=replace(machine.chip, devices=1))
    assert (
        decode_step(one, requests=1, context=1).hbm_s
        == 2 * decode_step(replace(one, machine=single), requests=1, context=1).hbm_s
    )


def test_the_least_of_a_prompt_is_its_matmuls_at_the_peak_of_all_chips():
    """123 and 455 ms for 15,360 tokens of the 31B on v6e-8 and on two H100."""
    dense = find_variant("gemma4-31b")
    for machine, flops_per_s, milliseconds in (("v6e-8", 8 * 918e12, 123), ("2xh100", 2 * 989.5e12, 455)):
        found = least_token_s(dense, MACHINES[machine])
        assert found == pytest.approx(2 * 29.3e9 / flops_per_s, rel=1e-3)
        assert round(1000 * 15_360 * found) == milliseconds
    for model in ("gemma4-e2b", "gemma4-26b-a4b", "gemma4-31b"):
        assert 15_360 * least_token_s(find_variant(model), MACHINES["1xh200"]) < prefill(served(model), 15_360).matmul_s
    assert least_token_s(replace(dense, kv_shared_layers=30), MACHINES["v6e-8"]) < 0.55 * least_token_s(
        dense, MACHINES["v6e-8"]
    )
