import pytest

LAYERS, TOKENS, MODEL, FFN, HEADS, HEAD = 6, 2048, 1024, 4096, 8, 128


def test_a_slice_of_the_stack_costs_one_layer(costs, named):
    sliced = named(costs, "constant_dynamic-slice_fusion.4")
    assert sliced.bytes == LAYERS * 2 * MODEL * FFN // 4  # read in HBM, written to on-chip memory


def test_an_update_of_a_buffer_costs_the_update_and_an_on_chip_array_nothing(module, only):
    fused = """
%inner (p0: bf16[64,1024,1024], p1: bf16[1,1024,1024], p2: s32[]) -> bf16[64,1024,1024] {
  %p0 = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(1)
  %p2 = s32[] parameter(2)
  %n = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} negate(%p1)
  ROOT %u = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p0, %n, %p2, %p2, %p2)
}"""
    entry = """
    %a = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
    %b = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)%s} parameter(1)
    %i = s32[] parameter(2)
    ROOT %f = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} fusion(%a, %b, %i), kind=kLoop, calls=%inner
    """
    layer = 2 * 1024 * 1024
    assert only(module(entry.replace("%s}", "}"), fused)).bytes == pytest.approx(2 * layer, rel=0.01)
    assert only(module(entry.replace("%s}", "S(1)}"), fused)).bytes == pytest.approx(layer, rel=0.01)


def test_padding_to_tiles_is_moved_too(module, only):
    text = "ROOT %n = f32[8,1]{1,0:T(8,128)} negate(%x)"
    assert only(module(f"%x = f32[8,1]{{1,0:T(8,128)}} parameter(0)\n{text}")).bytes == 2 * 4 * 8 * 128
    text = "ROOT %n = bf16[64,3]{0,1:T(8,128)(2,1)} negate(%x)"
    assert only(module(f"%x = bf16[64,3]{{0,1:T(8,128)(2,1)}} parameter(0)\n{text}")).bytes == 2 * 2 * 128 * 8


def test_what_runs_on_the_sparse_cores_takes_its_bytes(module, only):
    """Its computation closes with the name of its thread."""
    called = """
%scatter (p0: f32[1024,1024], p1: f32[8,128]) -> f32[1024,1024] {
  %p0 = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %p1 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %zero = s32[] constant(0)
  ROOT %u = f32[1024,1024]{1,0:T(8,128)} dynamic-update-slice(%p0, %p1, %zero, %zero)
}, execution_thread="sparsecore"
"""
    big = "f32[1024,1024]{1,0:T(8,128)}"
    start = 'call-start(%a, %b), async_execution_thread="sparsecore", to_apply=%scatter'
    entry = f"""
    %a = {big} parameter(0)
    %b = f32[8,128]{{1,0:T(8,128)}} parameter(1)
    %start = (({big}, f32[8,128]{{1,0:T(8,128)}}), {big}, u32[]) {start}
    ROOT %done = {big} call-done(%start)
    """
    assert only(module(entry, called)).bytes == 2 * 4 * 8 * 128
