from dataclasses import replace

import pytest

from gemsmith.errors import InputError
from gemsmith.hardware import load_catalog
from gemsmith.plan.aot.timeline import walk

CHIP = load_catalog().chips["v5p"]
LAYERS, TOKENS, MODEL, FFN, HEADS, HEAD = 6, 2048, 1024, 4096, 8, 128
SQUARE = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))


@pytest.fixture
def large_matmul(module):
    """The text of a matmul of 4096 x 16384 x 16384 on each chip."""
    return module(
        """
    %x = bf16[4096,16384]{1,0:T(8,128)(2,1)} parameter(0)
    %w = bf16[16384,16384]{1,0:T(8,128)(2,1)} parameter(1)
    ROOT %fusion = bf16[4096,16384]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kOutput, calls=%inner,"""
        """ metadata={op_name="jit(f)/dot"}, backend_config={"window_config":{"estimated_cycles":"8977448"}}
    """,
        """
%inner (p0: bf16[4096,16384], p1: bf16[16384,16384]) -> bf16[4096,16384] {
  %p0 = bf16[4096,16384]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[16384,16384]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[4096,16384]{1,0:T(8,128)(2,1)} convolution(%p0, %p1), dim_labels=bf_io->bf
}""",
    )


def test_a_large_matmul_takes_its_estimated_cycles(only, large_matmul):
    matmul = only(large_matmul)
    assert matmul.kind == "matmul" and matmul.op_name == "jit(f)/dot"
    assert matmul.busy_s == pytest.approx(5.13e-3, rel=1e-3)
    assert matmul.flops == 2 * 4096 * 16384**2
    assert matmul.bytes == 2 * (2 * 4096 * 16384 + 16384**2) and matmul.cycles_s == matmul.busy_s


def test_a_matmul_takes_at_least_its_bytes(only, large_matmul):
    assert only(large_matmul.replace("8977448", "10")).busy_s == pytest.approx(
        2 * (2 * 4096 * 16384 + 16384**2) / 2.765e12
    )


def test_without_an_estimate_a_matmul_runs_at_the_peak(only, large_matmul):
    assert only(large_matmul.replace("window_config", "other")).busy_s == pytest.approx(2 * 4096 * 16384**2 / 459e12)


def test_the_scan_is_counted_as_often_as_it_runs(costs, named):
    assert costs.flops("matmul") == LAYERS * 2 * 2 * TOKENS * MODEL * FFN
    assert named(costs, "splash_mha_fwd_no_residuals.1").count == LAYERS
    assert costs.unpriced == ()


def test_a_gather_that_waits_is_exposed_and_one_beside_a_matmul_is_not(costs):
    gathers = [each for each in costs.operations if each.kind == "collective"]
    # Each brings 3/4 of a matrix over two links of 100 GB/s.
    seconds = LAYERS * 0.75 * 2 * MODEL * FFN / 200e9
    assert [each.busy_s for each in gathers] == pytest.approx([seconds, seconds])
    assert sorted(each.exposed_s for each in gathers) == pytest.approx([0, seconds])
    assert costs.step_high_s - costs.step_low_s == pytest.approx(seconds)
    assert costs.step_serial_s - costs.step_low_s == pytest.approx(2 * seconds)


def test_kinds_add_up(costs):
    kinds = {each.kind for each in costs.operations}
    assert kinds == {"matmul", "kernel", "vector", "copy", "collective"}
    assert sum(map(costs.seconds, kinds)) == pytest.approx(costs.step_high_s)


def test_a_slower_chip_takes_longer(scan):
    slow = walk(scan, replace(CHIP, clock_hz=0.875e9), coordinates=SQUARE)
    assert slow.seconds("matmul") == pytest.approx(2 * walk(scan, CHIP, coordinates=SQUARE).seconds("matmul"))


def test_a_chip_without_a_clock_is_refused(scan):
    with pytest.raises(InputError, match=r"chips\.h100 has no clock_hz"):
        walk(scan, load_catalog().chips["h100"])


LOOP = """
%condition (s: (s32[], f32[8,128])) -> pred[] {{
  %s = (s32[]{{:T(128)}}, f32[8,128]{{1,0:T(8,128)}}) parameter(0)
  %at = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant({end})
  ROOT %less = pred[] compare(%at, %end), direction=LT
}}
""".strip()


BODY = """
%body (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %s.1 = (s32[]{{:T(128)}}, f32[8,128]{{1,0:T(8,128)}}) parameter(0)
  %at.1 = s32[] get-tuple-element(%s.1), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%at.1, %step)
  %x.1 = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%s.1), index=1
  %y = f32[8,128]{{1,0:T(8,128)}} negate(%x.1)
  ROOT %t = (s32[], f32[8,128]{{1,0:T(8,128)}}) tuple(%next, %y)
}}
""".strip()


@pytest.fixture
def loop(module):
    """Returns the costs of a loop from `start` to `end` in steps of `step`."""

    def make(*, start="constant(0)", end=10, step=1):
        entry = f"""
        %zero = s32[] {start}
        %x = f32[8,128]{{1,0:T(8,128)}} parameter(0)
        %t.1 = (s32[], f32[8,128]{{1,0:T(8,128)}}) tuple(%zero, %x)
        ROOT %w = (s32[], f32[8,128]{{1,0:T(8,128)}}) while(%t.1), condition=%condition, body=%body
        """
        return walk(module(entry, LOOP.format(end=end), BODY.format(step=step)), CHIP)

    return make


@pytest.mark.parametrize(
    ("start", "end", "step", "turns"), [("constant(0)", 10, 1, 10), ("constant(2)", 10, 2, 4), ("constant(0)", 7, 2, 4)]
)
def test_trips_come_from_start_end_and_step(start, end, step, turns, named, loop):
    assert named(loop(start=start, end=end, step=step), "y").count == turns


def test_a_loop_without_an_end_runs_once_and_is_named(named, loop):
    costs = loop(start="parameter(1)")
    assert named(costs, "y").count == 1 and costs.unpriced == ("trip count of w",)


@pytest.fixture
def collective(module, only):
    """Returns the seconds of one collective on `%x`, 2 MiB on each chip."""

    def make(line, partitions=4):
        return only(
            module(f"%x = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} parameter(0)\nROOT %c = {line}", partitions=partitions)
        ).busy_s

    return make


def test_collectives_move_what_a_ring_moves(collective):
    part, groups = 2 * 2**20, "replica_groups={{0,1,2,3}}"
    full = "bf16[1024,1024]{1,0:T(8,128)(2,1)}"
    assert collective(f"bf16[4096,1024]{{1,0:T(8,128)(2,1)}} all-gather(%x), channel_id=1, {groups}") == pytest.approx(
        3 * part / 200e9
    )
    assert collective(f"{full} all-reduce(%x), channel_id=1, {groups}") == pytest.approx(1.5 * part / 200e9)
    assert collective(f"{full} all-to-all(%x), channel_id=1, {groups}") == pytest.approx(0.75 * part / 200e9)
    assert collective(
        f"bf16[256,1024]{{1,0:T(8,128)(2,1)}} reduce-scatter(%x), channel_id=1, {groups}"
    ) == pytest.approx(0.75 * part / 200e9)
    assert collective(f"{full} all-reduce(%x), channel_id=1, replica_groups=[2,2]<=[4]") == pytest.approx(part / 100e9)
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    assert collective(f"{full} collective-permute(%x), channel_id=1, {pairs}") == pytest.approx(part / 100e9)


def test_an_all_reduce_of_which_each_chip_keeps_its_slice_moves_what_a_reduce_scatter_moves(module, only):
    fused = """
%all-reduce-scatter.1 (p: bf16[1024,1024]) -> bf16[256,1024] {
  %p = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %r = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}
  %zero = s32[] constant(0)
  ROOT %s = bf16[256,1024]{1,0:T(8,128)(2,1)} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={256,1024}
}"""
    entry = """
    %x = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
    ROOT %f = bf16[256,1024]{1,0:T(8,128)(2,1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
    """
    operation = only(module(entry, fused))
    assert operation.kind == "collective" and operation.busy_s == pytest.approx(0.75 * 2 * 2**20 / 200e9)


def test_a_gather_that_goes_on_inside_a_loop_is_charged_once(module):
    """A fusion names a gather in each of the steps that it runs beside; only its start takes time on the links."""
    gather = "bf16[4096,1024]{1,0:T(8,128)(2,1)}"
    step = f"""
%beside (p: bf16[1024,1024]) -> {gather} {{
  %p = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %g.1 = {gather} all-gather(%p), channel_id=7, replica_groups={{{{0,1,2,3}}}}
}}"""
    inside = BODY.format(step=1).replace(
        "negate(%x.1)", "fusion(%x.1), kind=kCustom, calls=%beside"
    )  # fmt: skip
    start = "all-gather-start(%shard), channel_id=7, replica_groups={{0,1,2,3}}"
    entry = f"""
    %zero = s32[] constant(0)
    %x = f32[8,128]{{1,0:T(8,128)}} parameter(0)
    %shard = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} parameter(1)
    %start = (bf16[1024,1024]{{1,0:T(8,128)(2,1)}}, {gather}) {start}
    %t.1 = (s32[], f32[8,128]{{1,0:T(8,128)}}) tuple(%zero, %x)
    %w = (s32[], f32[8,128]{{1,0:T(8,128)}}) while(%t.1), condition=%condition, body=%body
    ROOT %done = {gather} all-gather-done(%start)
    """
    costs = walk(module(entry, LOOP.format(end=10), step, inside), CHIP)
    assert costs.collectives_busy_s == pytest.approx(3 * 2 * 2**20 / 200e9)
