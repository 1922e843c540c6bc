"""Seconds of one run of a compiled TPU program by operation: compute, memory traffic, and collectives not hidden.

The order of a scheduled module is the order of execution. Three things run side by side: the core, the memory's copy
engines and the links. What starts asynchronously takes its time on its own engine, and only what its `done` still has
to wait for is exposed. A gather whose ring the core itself passes on (XLA's async collective fusion) goes on only in
fusions that name it: their programs look, tile by tile, whether a shard has arrived, and send it on. Beside anything
else no more than the shard that is on its way arrives. What runs on the sparse cores needs the core for nothing.

Assumed: matmuls take XLA's estimated cycles, at least their bytes / bandwidth; everything else its bytes / bandwidth,
arrays in on-chip memory free; kernels KERNEL_SHARE of the peak; a collective its bytes / what the worst placed chip of
its group receives over its links. No latency is charged, and no compute for vector operations.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from gemsmith.errors import InputError
from gemsmith.hardware import Chip
from gemsmith.plan.aot import collectives, hlo
from gemsmith.plan.aot.collectives import Coordinates, EngineClock, Transfer, traffic_of
from gemsmith.plan.aot.hlo import HBM, HOST, MATMULS, Array, Computation, Instruction, Module

KERNEL_SHARE = 0.5  # of the peak, in Mosaic kernels: assumed
HOST_BYTES_PER_S = 32e9  # a chip's way to its host's memory: assumed, PCIe 4 x16
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
KINDS = ("matmul", "kernel", "vector", "copy", "host", "collective")
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "partition-id",
    "replica-id", "opt-barrier", "optimization-barrier", "domain", "get-dimension-size", "rng-get-and-update-state",
    "copy-done", "slice-done",
}  # fmt: skip
_FREE_TARGETS = {
    "AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "AsyncCollectiveStart",
    "AsyncCollectiveDone",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One instruction in all its runs."""

    name: str
    kind: str
    op_name: str  # where it comes from in the program
    result: str
    count: int
    busy_s: float  # what it takes on its engine
    exposed_s: float  # what it adds to the step: less than busy_s only where it runs beside others
    cycles_s: float = 0.0
    """XLA's own estimate, which is not bandwidth-true for vector operations; 0 where it gives none."""
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one step takes on one chip."""

    chip: str
    operations: tuple[Operation, ...]
    unpriced: tuple[str, ...]
    """Kernels and loops of which the text does not say how much they do; those are charged by bytes, these run once."""

    def seconds(self, kind: str) -> float:
        """What a kind adds to the step, its exposed part."""
        return sum(each.exposed_s for each in self.operations if each.kind == kind)

    def flops(self, kind: str) -> float:
        return sum(each.flops for each in self.operations if each.kind == kind)

    @property
    def step_low_s(self) -> float:
        """Every collective hidden behind compute."""
        return sum(each.exposed_s for each in self.operations if each.kind != "collective")

    @property
    def step_high_s(self) -> float:
        """Collectives exposed as scheduled: synchronous ones in full, others in what their `done` waits for."""
        return self.step_low_s + self.seconds("collective")

    @property
    def step_serial_s(self) -> float:
        """Every collective exposed in full, whatever the schedule overlaps."""
        return self.step_low_s + self.collectives_busy_s

    @property
    def collectives_busy_s(self) -> float:
        return sum(each.busy_s for each in self.operations if each.kind == "collective")


def walk(text: str, chip: Chip, *, coordinates: Sequence[Coordinates] = ()) -> Costs:
    """The costs of a compiled module's text on a chip.

    coordinates: where each partition's chip stands, in order; without them groups are taken to be squares or rings.
    Raises InputError for a chip of which the catalog has no clock or links, and for text that is no HLO.
    """
    if chip.clock_hz is None or chip.link_bytes_per_s is None:
        raise InputError(
            f"hardware.catalog: chips.{chip.name} has no clock_hz or link_bytes_per_s; give both to read compiled "
            "programs"
        )
    module = hlo.parse(text)
    walker = _Walker(module=module, chip=chip, coordinates=tuple(coordinates), home=module.entry)
    walker.run()
    return Costs(chip=chip.name, operations=tuple(walker.operations), unpriced=tuple(dict.fromkeys(walker.unpriced)))


@dataclass(kw_only=True)
class _Walker:
    """One run of a computation, whose operations are noted as run `times` times."""

    module: Module
    chip: Chip
    coordinates: tuple[Coordinates, ...]
    home: Computation
    times: int = 1
    clock: EngineClock = field(default_factory=EngineClock)
    operations: list[Operation] = field(default_factory=list)
    unpriced: list[str] = field(default_factory=list)

    def run(self) -> float:
        for each in self.home.instructions.values():
            self._step(each)
        for key in list(self.clock.pending):
            self._finish(key)
        return self.clock.now

    def _step(self, each: Instruction) -> None:
        target = each.attribute(r'custom_call_target="([^"]*)"')
        if each.opcode in ("while", "conditional", "call"):
            self.clock.spend(self._inner(each))
        elif each.opcode.endswith("-done"):
            start = each.inputs[0]
            while start.opcode in ("get-tuple-element", "bitcast", "opt-barrier", "async-update"):
                start = start.inputs[0]
            self._finish_all(start)
        elif each.opcode in _FREE or target in _FREE_TARGETS:
            return
        elif each.opcode == "fusion" and (moved := [one for one in self.module.inside(each) if _collective(one)]):
            self._with_collective(each, moved)
        elif _collective(each):
            self._collective(each, each, waits=not each.opcode.endswith("-start"))
        elif each.opcode.endswith("-start"):
            self._asynchronous(each)
        else:
            self._compute(each)

    def _inner(self, each: Instruction) -> float:
        """Seconds of all turns of a loop, or of the longest branch."""
        names, turns = each.called, 1
        if each.opcode == "while":
            names = (each.attribute(r"body=%([^\s,]+)"),)
            if (known := hlo.trip_count(each, self.module)) is None:
                self.unpriced.append(f"trip count of {each.name}")
            else:
                turns = known
        times, outside = self.times * turns, self.clock.outside | self.clock.pending.keys()
        bodies = [self.module.computations[name] for name in names]
        runs = [
            replace(self, home=body, times=times, clock=EngineClock(outside=outside), operations=[]) for body in bodies
        ]
        longest = max(runs, key=_Walker.run)
        self.operations.extend(longest.operations)
        return turns * longest.clock.now

    def _compute(self, each: Instruction, passes_on: Container[str] = ()) -> None:
        read = traffic_of(each, self.module)
        memory_s = read / self.chip.hbm_bytes_per_s
        flops = self.module.flops(each)
        kind, seconds = "vector", memory_s
        if flops or each.opcode in MATMULS:
            kind, seconds = "matmul", max(memory_s, (each.cycles / self._clock_hz) or flops / self.chip.flops_per_s)
        elif "tpu_custom_call" in each.attributes:
            known = hlo.kernel_flops(each)
            if known is None:
                self.unpriced.append(f"kernel {each.name}")
            kind, flops = "kernel", known or 0.0
            seconds = max(memory_s, flops / self.chip.flops_per_s / KERNEL_SHARE)
        elif each.opcode == "copy":
            kind = "copy"
        self.clock.spend(seconds, memory_s=memory_s, passes_on=passes_on)
        self._note(each, kind, seconds, seconds, flops=flops, moved=read)

    def _asynchronous(self, each: Instruction) -> None:
        """A copy or slice between memories that runs beside the core."""
        if inside := next((one for one in self.module.inside(each) if _collective(one)), None):
            self._collective(each, inside, waits=False)
            return
        engine = "copy"
        if each.called:
            moved = self._called_bytes(each)
        else:  # between memories: what it moves through HBM, or to the host
            outer = [array for array in each.arrays if array.dtype not in ("u32", "s32") or array.shape]
            moved = min(array.bytes for array in outer)
            source = each.inputs[0].arrays
            spaces = [*(array.space for array in outer if array.bytes == moved), *(array.space for array in source)]
            if HOST in spaces:
                engine = "host"
            elif spaces.count(HBM) == len(spaces):
                moved *= 2
        seconds = moved / (HOST_BYTES_PER_S if engine == "host" else self.chip.hbm_bytes_per_s)
        self.clock.pending[f"{engine} {each.name}"] = Transfer(engine, seconds, len(self.operations))
        self._note(each, engine, seconds, 0.0, moved=moved)

    def _called_bytes(self, each: Instruction) -> int:
        """Traffic of a computation that runs on another unit of the chip, such as a scatter on the sparse cores."""
        bodies = [self.module.computations[name] for name in each.called]
        parts = [part for body in bodies for part in body.instructions.values() if part.opcode not in _FREE]
        return sum(
            self._called_bytes(part)
            if part.opcode.endswith("-start") and part.called
            else traffic_of(part, self.module)
            for part in parts
            if not part.opcode.endswith("-done")
        )

    def _with_collective(self, each: Instruction, moved: list[Instruction]) -> None:
        """A fusion with a collective in it: it starts or ends one, runs beside one that is under way, or is one."""
        targets = {one.attribute(r'custom_call_target="([^"]*)"') for one in self.module.inside(each)}
        first, keys = moved[0], {f"collective {_key(one)}" for one in moved}
        if "AsyncCollectiveDone" in targets:
            self._finish_all(first)
        elif "AsyncCollectiveStart" in targets:
            self._collective(first, first, waits=False, passed_on=True)
        elif keys <= self.clock.pending.keys() | self.clock.outside:
            self._compute(each, passes_on=keys)
        else:
            # An all-reduce of which each chip keeps its slice: the chips exchange only that.
            scatters = bool(each.called) and each.called[0].startswith("all-reduce-scatter")
            for one in moved:
                self._collective(each, one, waits=True, scatters=scatters)
            if self.module.flops(each):
                self._compute(each)

    def _collective(
        self, shown: Instruction, each: Instruction, *, waits: bool, scatters: bool = False, passed_on: bool = False
    ) -> None:
        kind = "reduce-scatter" if scatters else each.opcode.removesuffix("-start")
        arrays = [array for source in each.inputs for array in source.arrays]
        seconds, moved = self._link_seconds(kind, each, arrays)
        engine = "collective"
        if kind == "collective-permute":
            # The two directions of a ring are two engines: a link carries as much each way at once.
            pairs = collectives.read_pairs(each.attributes)
            ahead = sum((target - source) % len(pairs) <= len(pairs) // 2 for source, target in pairs)
            engine = "forward" if 2 * ahead >= len(pairs) else "backward"
        exposed = 0.0
        if waits:
            queued = self.clock.queued(engine)
            self.clock.spend(queued)
            self.clock.spend(seconds, taken=engine)
            exposed = queued + seconds
        else:
            steps = len(collectives.read_group(each.attributes, self.module.partitions)) - 1 if passed_on else 0
            self.clock.pending[f"collective {_key(shown)}"] = Transfer(engine, seconds, len(self.operations), steps)
        self._note(shown, "collective", seconds, exposed, moved=moved)

    def _link_seconds(self, kind: str, each: Instruction, arrays: Sequence[Array]) -> tuple[float, float]:
        """Seconds on the links and the bytes that a chip receives, padding included.

        A group of n: all-gather (n-1) x its shard, reduce-scatter (n-1)/n x its input, all-reduce both, all-to-all
        (n-1)/n x its input x the mean number of hops; a permutation its input over one link x the hops.
        """
        given = sum(array.bytes for array in arrays)
        link = self.chip.link_bytes_per_s or 0.0
        if kind == "collective-permute":
            return given * collectives.hops_of(collectives.read_pairs(each.attributes), self.coordinates) / link, given
        group = collectives.read_group(each.attributes, self.module.partitions)
        count = len(group)
        share = (count - 1) / count
        moved = given * {"all-gather": count - 1, "all-reduce": 2 * share}.get(kind, share)
        hops = max(1.0, count / 4) if kind.endswith("all-to-all") else 1.0
        return moved * hops / (link * collectives.links_of(group, self.coordinates)), moved

    def _finish_all(self, start: Instruction) -> None:
        for engine in ("collective", "copy", "host"):
            self._finish(f"{engine} {_key(start)}")

    def _finish(self, key: str) -> None:
        if key in self.clock.pending:
            noted = self.operations[place := self.clock.pending[key].place]
            self.operations[place] = replace(noted, exposed_s=noted.exposed_s + self.clock.finish(key) * noted.count)

    def _note(
        self, each: Instruction, kind: str, busy: float, exposed: float, *, flops: float = 0.0, moved: float = 0.0
    ) -> None:
        arrays = (array for array in each.arrays if prod(array.shape) > 1)
        result = " ".join(f"{array.dtype}[{','.join(map(str, array.shape))}]" for array in arrays)
        self.operations.append(
            Operation(
                name=each.name,
                kind=kind,
                op_name=each.op_name,
                result=result[:120],
                count=self.times,
                busy_s=busy * self.times,
                exposed_s=exposed * self.times,
                cycles_s=each.cycles / self._clock_hz * self.times,
                flops=flops * self.times,
                bytes=moved * self.times,
            )
        )

    @property
    def _clock_hz(self) -> float:
        assert self.chip.clock_hz
        return self.chip.clock_hz


def _collective(each: Instruction) -> bool:
    return each.opcode.removesuffix("-start") in COLLECTIVES


def _key(each: Instruction) -> str:
    """What start and done have in common: the channel, or the name where there is none."""
    return each.attribute(r"channel_id=(\d+)") or each.name
