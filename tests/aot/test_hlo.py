"""golden/scan_v5p.hlo: XLA's text for v5p:2x2x1, layouts and cycles kept, Mosaic's code taken out, of a scan over 6
layers of x + attention(x), then x + relu(x U) D, with x (4, 2048, 1024) split by rows, U (1024, 4096) and D (4096,
1024) split over the chips."""

from dataclasses import replace
from pathlib import Path

import pytest

from gemsmith.aot.collectives import hops_of, links_of, read_group, read_pairs
from gemsmith.aot.hlo import matmul_flops, parse
from gemsmith.aot.timeline import walk
from gemsmith.errors import InputError
from gemsmith.hardware import load_catalogue

GOLDEN = Path(__file__).parent / "golden"
CHIP = load_catalogue().chips["v5p"]
LAYERS, TOKENS, MODEL, FFN, HEADS, HEAD = 6, 2048, 1024, 4096, 8, 128
SQUARE = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))


@pytest.fixture(scope="module")
def scan():
    return (GOLDEN / "scan_v5p.hlo").read_text()


@pytest.fixture(scope="module")
def costs(scan):
    return walk(scan, CHIP, coordinates=SQUARE)


def module(body: str, *others: str, partitions: int = 4) -> str:
    """A scheduled module with one entry: `body` are its lines, `others` whole computations."""
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    return f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n" + "".join(
        f"{other.strip()}\n\n" for other in (*others, f"ENTRY %main (a: f32[]) -> f32[] {{\n{lines}\n}}")
    )


def only(text: str):
    (operation,) = (each for each in walk(text, CHIP).operations if each.busy_s)
    return operation


def named(costs, name):
    return next(each for each in costs.operations if each.name == name)


# What a large matmul takes: 4096 x 16384 x 16384 on each chip.
MATMUL = module(
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


def test_a_large_matmul_takes_its_estimated_cycles():
    matmul = only(MATMUL)
    assert matmul.kind == "matmul" and matmul.op_name == "jit(f)/dot"
    assert matmul.busy_s == pytest.approx(5.13e-3, rel=1e-3)
    assert matmul.flops == 2 * 4096 * 16384**2
    assert matmul.bytes == 2 * (2 * 4096 * 16384 + 16384**2) and matmul.cycles_s == matmul.busy_s


def test_a_matmul_takes_at_least_its_bytes():
    assert only(MATMUL.replace("8977448", "10")).busy_s == pytest.approx(2 * (2 * 4096 * 16384 + 16384**2) / 2.765e12)


def test_without_an_estimate_a_matmul_runs_at_the_peak():
    assert only(MATMUL.replace("window_config", "other")).busy_s == pytest.approx(2 * 4096 * 16384**2 / 459e12)


def test_the_scan_is_counted_as_often_as_it_runs(costs):
    assert costs.matmul_flops == LAYERS * 2 * 2 * TOKENS * MODEL * FFN
    assert named(costs, "splash_mha_fwd_no_residuals.1").count == LAYERS
    assert costs.unpriced == ()


def test_splash_is_charged_the_blocks_of_its_mask_at_half_the_peak(costs):
    # 4 rows of blocks of 512 x 512; row i of the causal mask has i + 1.
    flops = LAYERS * HEADS * 10 * 2 * (2 * 512 * 512 * HEAD)
    assert costs.kernel_flops == flops
    assert costs.seconds("kernel") == pytest.approx(flops / 459e12 / 0.5)


def test_a_gather_that_waits_is_exposed_and_one_beside_a_matmul_is_not(costs):
    gathers = [each for each in costs.operations if each.kind == "collective"]
    # Each brings 3/4 of a matrix over two links of 100 GB/s.
    seconds = LAYERS * 0.75 * 2 * MODEL * FFN / 200e9
    assert [each.busy_s for each in gathers] == pytest.approx([seconds, seconds])
    assert sorted(each.exposed_s for each in gathers) == pytest.approx([0, seconds])
    assert costs.step_high_s - costs.step_low_s == pytest.approx(seconds)
    assert costs.step_serial_s - costs.step_low_s == pytest.approx(2 * seconds)


def test_a_slice_of_the_stack_costs_one_layer(costs):
    sliced = named(costs, "constant_dynamic-slice_fusion.4")
    assert sliced.bytes == LAYERS * 2 * MODEL * FFN // 4  # read in HBM, written to on-chip memory


def test_kinds_add_up(costs):
    kinds = {each.kind for each in costs.operations}
    assert kinds == {"matmul", "kernel", "vector", "copy", "collective"}
    assert sum(map(costs.seconds, kinds)) == pytest.approx(costs.step_high_s)
    assert costs.most_expensive(1)[0].exposed_s == max(each.exposed_s for each in costs.operations)


def test_a_slower_chip_takes_longer(scan):
    slow = walk(scan, replace(CHIP, clock_hz=0.875e9), coordinates=SQUARE)
    assert slow.seconds("matmul") == pytest.approx(2 * walk(scan, CHIP, coordinates=SQUARE).seconds("matmul"))


def test_a_chip_without_a_clock_is_refused(scan):
    with pytest.raises(InputError, match=r"chips\.h100 has no clock_hz"):
        walk(scan, load_catalogue().chips["h100"])


def test_text_that_is_no_hlo_is_refused():
    with pytest.raises(InputError, match="does not start with HloModule"):
        walk("module @jit", CHIP)


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


def loop(*, start="constant(0)", end=10, step=1):
    entry = f"""
    %zero = s32[] {start}
    %x = f32[8,128]{{1,0:T(8,128)}} parameter(0)
    %t.1 = (s32[], f32[8,128]{{1,0:T(8,128)}}) tuple(%zero, %x)
    ROOT %w = (s32[], f32[8,128]{{1,0:T(8,128)}}) while(%t.1), condition=%condition, body=%body
    """
    return walk(module(entry, LOOP.format(end=end), BODY.format(step=step)), CHIP)


@pytest.mark.parametrize(
    ("start", "end", "step", "turns"), [("constant(0)", 10, 1, 10), ("constant(2)", 10, 2, 4), ("constant(0)", 7, 2, 4)]
)
def test_trips_come_from_start_end_and_step(start, end, step, turns):
    assert named(loop(start=start, end=end, step=step), "y").count == turns


def test_a_loop_without_an_end_runs_once_and_is_named():
    costs = loop(start="parameter(1)")
    assert named(costs, "y").count == 1 and costs.unpriced == ("trip count of w",)


def test_an_update_of_a_buffer_costs_the_update_and_an_on_chip_array_nothing():
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


def test_padding_to_tiles_is_moved_too():
    text = "ROOT %n = f32[8,1]{1,0:T(8,128)} negate(%x)"
    assert only(module(f"%x = f32[8,1]{{1,0:T(8,128)}} parameter(0)\n{text}")).bytes == 2 * 4 * 8 * 128
    text = "ROOT %n = bf16[64,3]{0,1:T(8,128)(2,1)} negate(%x)"
    assert only(module(f"%x = bf16[64,3]{{0,1:T(8,128)(2,1)}} parameter(0)\n{text}")).bytes == 2 * 2 * 128 * 8


BIG = "bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)}"
COPY = f"""
    %x = {BIG} parameter(0)
    %y = f32[8,128]{{1,0:T(8,128)}} parameter(1)
    %start = ({BIG.replace(")}", ")S(1)}")}, {BIG}, u32[]{{:S(2)}}) copy-start(%x)
    %beside = f32[8,128]{{1,0:T(8,128)}} negate(%y)
    ROOT %done = {BIG.replace(")}", ")S(1)}")} copy-done(%start)
"""


def test_a_copy_beside_compute_is_exposed_by_what_is_left_of_it():
    costs = walk(module(COPY), CHIP)
    copy, beside = named(costs, "start"), named(costs, "beside")
    assert copy.kind == "copy" and copy.busy_s == pytest.approx(2 * 64 * 2**20 / 2.765e12)
    # What the core moves meanwhile comes out of the same bandwidth.
    assert copy.exposed_s == pytest.approx(copy.busy_s)
    assert costs.step_low_s == pytest.approx(copy.busy_s + beside.busy_s)


def test_memory_traffic_adds_up_however_it_overlaps():
    second = COPY.splitlines()[3].replace("%start", "%start.2")
    entry = COPY.replace("ROOT %done", f"{second.strip()}\n    %done").rstrip()
    costs = walk(module(f"{entry}\n    ROOT %done.2 = {BIG} copy-done(%start.2)"), CHIP)
    assert costs.step_low_s == pytest.approx((2 * 2 * 64 * 2**20 + 2 * 4 * 8 * 128) / 2.765e12, rel=1e-9)


def test_a_copy_to_the_host_goes_over_its_own_slower_way():
    costs = walk(module(COPY.replace("S(1)", "S(5)")), CHIP)
    assert named(costs, "start").kind == "host"
    assert named(costs, "start").busy_s == pytest.approx(2 * 64 * 2**20 / 32e9)


def collective(line, partitions=4):
    return only(
        module(f"%x = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} parameter(0)\nROOT %c = {line}", partitions=partitions)
    ).busy_s


def test_collectives_move_what_a_ring_moves():
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


def test_an_all_reduce_of_which_each_chip_keeps_its_slice_moves_what_a_reduce_scatter_moves():
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


def test_groups_are_read_in_every_form():
    assert read_group("replica_groups={{0,2},{1,3}}, x", 4) == (0, 2)
    assert read_group("replica_groups=[2,4]<=[8], x", 8) == (0, 1, 2, 3)
    assert read_group("replica_groups=[4,2]<=[2,4]T(1,0), x", 8) == (0, 4)
    assert read_group("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, x", 8) == (0, 4)
    assert read_group("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}, x", 8) == tuple(range(8))
    assert read_group("x", 4) == (0, 1, 2, 3)
    assert read_pairs("source_target_pairs={{0,1},{1,0}}, x") == ((0, 1), (1, 0))


def test_links_are_those_of_the_worst_placed_chip():
    row = [(x, 0, 0) for x in range(4)]
    assert links_of(range(4), SQUARE) == 2 and links_of((0, 1), SQUARE) == 1 and links_of((0, 3), SQUARE) == 1
    assert links_of(range(4), row) == 1 and links_of(range(4), ()) == 2
    assert hops_of(((0, 1), (3, 0)), row) == 3 and hops_of(((0, 1),), ()) == 1


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
def test_convolutions_count_the_products_that_they_need(left, right, out, attributes, pairs):
    home = parse(
        module(
            f"%l = {left} parameter(0)\n%r = {right} parameter(1)\nROOT %c = {out} convolution(%l, %r), {attributes}"
        )
    ).entry
    assert matmul_flops(home.root, home) == 2 * pairs * 2048 * 1024 * 512


def test_a_dot_counts_its_contraction():
    lines = "%l = bf16[8,64]{1,0} parameter(0)\n%r = bf16[64,32]{1,0} parameter(1)"
    home = parse(
        module(
            f"{lines}\nROOT %c = bf16[8,32]{{1,0}} dot(%l, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
        )
    ).entry
    assert matmul_flops(home.root, home) == 2 * 8 * 64 * 32


def test_a_kernel_that_nobody_knows_is_charged_its_bytes_and_named():
    call = 'ROOT %odd.1 = f32[1024,1024]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call"'
    text = module(f"%x = f32[1024,1024]{{1,0:T(8,128)}} parameter(0)\n{call}")
    costs = walk(text, CHIP)
    assert costs.unpriced == ("kernel odd.1",) and costs.seconds("kernel") == pytest.approx(2 * 4 * 2**20 / 2.765e12)
    told = walk(text, CHIP, kernels={"odd": lambda call, home: 459e12})
    assert told.unpriced == () and told.seconds("kernel") == pytest.approx(2.0)
    estimate = ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"459000000000000"}}}'
    assert walk(text.replace('"tpu_custom_call"', '"tpu_custom_call"' + estimate), CHIP).seconds(
        "kernel"
    ) == pytest.approx(2.0)


def test_a_kernel_of_integers_alone_multiplies_nothing():
    call = 'ROOT %odd.1 = s32[1024]{0:T(1024)} custom-call(%x), custom_call_target="tpu_custom_call"'
    assert walk(module(f"%x = s32[1024]{{0:T(1024)}} parameter(0)\n{call}"), CHIP).unpriced == ()


def test_a_gather_that_goes_on_inside_a_loop_is_charged_once():
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


SHARD, WHOLE = "bf16[1024,1024]{1,0:T(8,128)(2,1)}", "bf16[4096,1024]{1,0:T(8,128)(2,1)}"
GATHER = f"{WHOLE} all-gather(%p), channel_id=7, replica_groups={{{{0,1,2,3}}}}"
RING_S = 3 * 2 * 2**20 / 200e9


def part(name: str, shape: str, root: str, *others: str) -> str:
    """A computation that names the gather."""
    lines = (f"%p = {SHARD} parameter(0)", *others, f"%g = {GATHER}", f"ROOT {root}")
    return f"%{name} (p: bf16[1024,1024]) -> {shape} {{\n" + "".join(f"  {line}\n" for line in lines) + "}"


def waited(middle: list[str], *parts: str, start: str, done: str) -> float:
    """What the core waits for a gather, as a share of what it takes, with that between its start and its end."""
    lines = (f"%shard = {SHARD} parameter(0)", f"%start = {start}", *middle, f"ROOT %done = {WHOLE} {done}")
    costs = walk(module("\n".join(lines), *parts), CHIP)
    assert costs.collectives_busy_s == pytest.approx(RING_S)
    return costs.seconds("collective") / RING_S


def waited_for_a_ring(*middle: tuple[bool, float]) -> float:
    """The same where the core passes the ring on; `middle`: whether a fusion looks after it, and how many of its three
    steps it takes."""
    begins = part(
        "begins", WHOLE, f'%c = ({SHARD}, {WHOLE}) custom-call(%g), custom_call_target="AsyncCollectiveStart"'
    )
    ends = part("ends", WHOLE, f'%c = {WHOLE} custom-call(%p, %g), custom_call_target="AsyncCollectiveDone"')
    lines, parts = [], []
    for at, (looks, steps) in enumerate(middle):
        size = round(steps * RING_S / 3 * CHIP.hbm_bytes_per_s / 2 / 4096)
        array = f"f32[{size},1024]{{1,0:T(1,128)}}"
        lines.append(f"%y.{at} = {array} parameter({at + 1})")
        beside = f"fusion(%shard, %y.{at}), kind=kCustom, calls=%looks.{at}" if looks else f"negate(%y.{at})"
        lines.append(f"%n.{at} = {array} {beside}")
        parts.append(part(f"looks.{at}", array, f"%m = {array} negate(%q)", f"%q = {array} parameter(1)"))
    start, done = (
        f"({SHARD}, {WHOLE}) fusion(%shard), kind=kCustom, calls=%begins",
        "fusion(%shard), kind=kCustom, calls=%ends",
    )
    return waited(lines, begins, ends, *parts, start=start, done=done)


@pytest.mark.parametrize(
    ("middle", "left"),
    [
        ([(False, 0.5)], 2.5),
        ([(False, 5)], 2),  # no more than the shard that is on its way
        ([(False, 5), (False, 5)], 2),
        ([(True, 1.5)], 1.5),
        ([(True, 1.5), (False, 5)], 1),
        ([(False, 5), (True, 1.25), (False, 0.5)], 0.25),
        ([(True, 5)], 0),
    ],
)
def test_a_ring_goes_on_where_a_fusion_looks_after_it(middle, left):
    assert waited_for_a_ring(*middle) == pytest.approx(left / 3, abs=1e-3)


def test_a_gather_of_the_sparse_cores_needs_the_core_for_nothing():
    gathers = part("gathers", WHOLE, f"%r = {WHOLE} bitcast(%g)") + ', execution_thread="sparsecore"'
    start = f'(({SHARD}), {WHOLE}) call-start(%shard), async_execution_thread="sparsecore", to_apply=%gathers'
    array = "f32[65536,1024]{1,0:T(8,128)}"
    middle = [f"%y = {array} parameter(1)", f"%n = {array} negate(%y)"]
    assert waited(middle, gathers, start=start, done="call-done(%start)") == 0
    assert waited([], gathers, start=start, done="call-done(%start)") == pytest.approx(1)


def test_what_runs_on_the_sparse_cores_takes_its_bytes():
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
