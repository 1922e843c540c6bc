import pytest

from gemsmith.hardware import load_catalog
from gemsmith.plan.aot.timeline import walk

CHIP = load_catalog().chips["v5p"]
BIG = "bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)}"
COPY = f"""
    %x = {BIG} parameter(0)
    %y = f32[8,128]{{1,0:T(8,128)}} parameter(1)
    %start = ({BIG.replace(")}", ")S(1)}")}, {BIG}, u32[]{{:S(2)}}) copy-start(%x)
    %beside = f32[8,128]{{1,0:T(8,128)}} negate(%y)
    ROOT %done = {BIG.replace(")}", ")S(1)}")} copy-done(%start)
"""


def test_a_copy_beside_compute_is_exposed_by_what_is_left_of_it(module, named):
    costs = walk(module(COPY), CHIP)
    copy, beside = named(costs, "start"), named(costs, "beside")
    assert copy.kind == "copy" and copy.busy_s == pytest.approx(2 * 64 * 2**20 / 2.765e12)
    # What the core moves meanwhile comes out of the same bandwidth.
    assert copy.exposed_s == pytest.approx(copy.busy_s)
    assert costs.step_low_s == pytest.approx(copy.busy_s + beside.busy_s)


def test_memory_traffic_adds_up_however_it_overlaps(module):
    second = COPY.splitlines()[3].replace("%start", "%start.2")
    entry = COPY.replace("ROOT %done", f"{second.strip()}\n    %done").rstrip()
    costs = walk(module(f"{entry}\n    ROOT %done.2 = {BIG} copy-done(%start.2)"), CHIP)
    assert costs.step_low_s == pytest.approx((2 * 2 * 64 * 2**20 + 2 * 4 * 8 * 128) / 2.765e12, rel=1e-9)


def test_a_copy_to_the_host_goes_over_its_own_slower_way(module, named):
    costs = walk(module(COPY.replace("S(1)", "S(5)")), CHIP)
    assert named(costs, "start").kind == "host"
    assert named(costs, "start").busy_s == pytest.approx(2 * 64 * 2**20 / 32e9)


SHARD, WHOLE = "bf16[1024,1024]{1,0:T(8,128)(2,1)}", "bf16[4096,1024]{1,0:T(8,128)(2,1)}"
GATHER = f"{WHOLE} all-gather(%p), channel_id=7, replica_groups={{{{0,1,2,3}}}}"
RING_S = 3 * 2 * 2**20 / 200e9


def part(name: str, shape: str, root: str, *others: str) -> str:
    """A computation that names the gather."""
    lines = (f"%p = {SHARD} parameter(0)", *others, f"%g = {GATHER}", f"ROOT {root}")
    return f"%{name} (p: bf16[1024,1024]) -> {shape} {{\n" + "".join(f"  {line}\n" for line in lines) + "}"


@pytest.fixture
def waited(module):
    """Returns what the core waits for a gather, as a share of its time, with that between its start and its end."""

    def make(middle: list[str], *parts: str, start: str, done: str) -> float:
        lines = (f"%shard = {SHARD} parameter(0)", f"%start = {start}", *middle, f"ROOT %done = {WHOLE} {done}")
        costs = walk(module("\n".join(lines), *parts), CHIP)
        assert costs.collectives_busy_s == pytest.approx(RING_S)
        return costs.seconds("collective") / RING_S

    return make


@pytest.fixture
def waited_for_a_ring(waited):
    """Returns the same where the core passes the ring on, for what runs meanwhile: whether a fusion looks after it,
    and how many of its three steps it takes."""

    def make(*middle: tuple[bool, float]) -> float:
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

    return make


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
def test_a_ring_goes_on_where_a_fusion_looks_after_it(middle, left, waited_for_a_ring):
    assert waited_for_a_ring(*middle) == pytest.approx(left / 3, abs=1e-3)


def test_a_gather_of_the_sparse_cores_needs_the_core_for_nothing(waited):
    gathers = part("gathers", WHOLE, f"%r = {WHOLE} bitcast(%g)") + ', execution_thread="sparsecore"'
    start = f'(({SHARD}), {WHOLE}) call-start(%shard), async_execution_thread="sparsecore", to_apply=%gathers'
    array = "f32[65536,1024]{1,0:T(8,128)}"
    middle = [f"%y = {array} parameter(1)", f"%n = {array} negate(%y)"]
    assert waited(middle, gathers, start=start, done="call-done(%start)") == 0
    assert waited([], gathers, start=start, done="call-done(%start)") == pytest.approx(1)
