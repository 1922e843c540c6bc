import pytest

from gemsmith.hardware import load_catalog
from gemsmith.plan.aot.timeline import walk

CHIP = load_catalog().chips["v5p"]
LAYERS, TOKENS, MODEL, FFN, HEADS, HEAD = 6, 2048, 1024, 4096, 8, 128


def test_splash_is_charged_the_blocks_of_its_mask_at_half_the_peak(costs):
    # 4 rows of blocks of 512 x 512; row i of the causal mask has i + 1.
    flops = LAYERS * HEADS * 10 * 2 * (2 * 512 * 512 * HEAD)
    assert costs.flops("kernel") == flops
    assert costs.seconds("kernel") == pytest.approx(flops / 459e12 / 0.5)


def test_a_kernel_that_nobody_knows_is_charged_its_bytes_and_named(module):
    call = 'ROOT %odd.1 = f32[1024,1024]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call"'
    text = module(f"%x = f32[1024,1024]{{1,0:T(8,128)}} parameter(0)\n{call}")
    costs = walk(text, CHIP)
    assert costs.unpriced == ("kernel odd.1",) and costs.seconds("kernel") == pytest.approx(2 * 4 * 2**20 / 2.765e12)
    estimate = ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"459000000000000"}}}'
    assert walk(text.replace('"tpu_custom_call"', '"tpu_custom_call"' + estimate), CHIP).seconds(
        "kernel"
    ) == pytest.approx(2.0)


def test_a_kernel_of_integers_alone_multiplies_nothing(module):
    call = 'ROOT %odd.1 = s32[1024]{0:T(1024)} custom-call(%x), custom_call_target="tpu_custom_call"'
    assert walk(module(f"%x = s32[1024]{{0:T(1024)}} parameter(0)\n{call}"), CHIP).unpriced == ()
