import pytest

from gemsmith.errors import InputError
from gemsmith.hardware import load_catalog
from gemsmith.plan.aot.hlo import bits_of, matmul_flops, parse
from gemsmith.plan.aot.timeline import walk

CHIP = load_catalog().chips["v5p"]


def test_text_that_is_no_hlo_is_refused():
    with pytest.raises(InputError, match="does not start with HloModule"):
        walk("module @jit", CHIP)


def test_an_element_type_without_a_size_is_named():
    assert [bits_of(dtype) for dtype in ("bf16", "s4", "f8e4m3fn", "pred", "token")] == [16, 4, 8, 8, 0]
    with pytest.raises(AssertionError, match="element type quux"):
        bits_of("quux")


CONVOLUTIONS = [
    # 8 matrices that share their left side, as a window of 8 over padding: only the 8 pairs that meet count, of 64.
    (
        "bf16[1,2048,1024]",
        "bf16[8,1024,512]",
        "bf16[8,2048,512]",
        "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
        8,
    ),
    ("bf16[8,2048,1024]", "bf16[8,1024,512]", "bf16[1,2048,512]", "window={size=8}, dim_labels=0bf_0io->0bf", 8),
    ("bf16[2048,1024]", "bf16[1024,512]", "bf16[2048,512]", "dim_labels=bf_io->bf", 1),
    (
        "bf16[8,2048,1024]",
        "bf16[8,1024,512]",
        "bf16[8,2048,512]",
        "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
        8,
    ),
]


@pytest.mark.parametrize(("left", "right", "out", "attributes", "pairs"), CONVOLUTIONS)
def test_convolutions_count_the_products_that_they_need(left, right, out, attributes, pairs, module):
    home = parse(
        module(
            f"%l = {left} parameter(0)\n%r = {right} parameter(1)\nROOT %c = {out} convolution(%l, %r), {attributes}"
        )
    ).entry
    assert matmul_flops(home.root) == 2 * pairs * 2048 * 1024 * 512


def test_a_dot_counts_its_contraction(module):
    lines = "%l = bf16[8,64]{1,0} parameter(0)\n%r = bf16[64,32]{1,0} parameter(1)"
    home = parse(
        module(
            f"{lines}\nROOT %c = bf16[8,32]{{1,0}} dot(%l, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
        )
    ).entry
    assert matmul_flops(home.root) == 2 * 8 * 64 * 32
