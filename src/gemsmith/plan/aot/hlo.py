"""Compiled XLA text as computations and instructions: shapes and their memory, trip counts, FLOPs.

FLOPs of the Mosaic kernels that JAX ships are read from their names, block sizes and shapes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod
from typing import Any

from gemsmith.errors import InputError

# Memory spaces of a layout, S(n); 1 is the chip's own vector memory, the others hold scalars and flags.
HBM, HOST = 0, 5
_BITS = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"\s+(ROOT )?%(\S+) = ")
_HEADER = re.compile(r"(ENTRY )?%(\S+) \(")
_CLOSING = re.compile(r"\}(, execution_thread=\S+)?$")
_OPERAND = re.compile(r"%([^\s,()]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[^\s,]+)"
)
MATMULS = ("convolution", "dot")
_COPIES = ("copy", "bitcast", "copy-done", "copy-start")
# Products of one block of scores, each 2 x block_q x block_kv x head_dim: scores and output; then their gradients.
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4, "fused": 5}
_BLOCKS = {"fwd": "block_kv", "dq": "block_kv_dq", "dkv": "block_q_dkv"}
"""What a kernel calls the size of the blocks that it goes through for each block of its own."""


def _first(pattern: str, text: str) -> str:
    """The first group of a pattern in a text, or nothing."""
    found = re.search(pattern, text)
    return found[1] if found else ""


@dataclass(frozen=True, kw_only=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    layout: str

    @cached_property
    def space(self) -> int:
        return int(_first(r"S\((\d+)\)", self.layout) or HBM)

    @cached_property
    def bytes(self) -> int:
        """What the array occupies, padding to its tiles included: f32[8,1]{1,0:T(8,128)} -> 4096."""
        order, _, tiles = self.layout.partition(":")
        shape = [self.shape[int(axis)] for axis in reversed(order.split(",")) if axis] if order else list(self.shape)
        tile = _first(r"T\(([\d,]+)\)", tiles)
        if tile and shape:
            sizes = [int(size) for size in tile.split(",")]
            shape = [prod(shape)] if len(sizes) == 1 else [1] * (len(sizes) - len(shape)) + shape
            tiled = zip(shape[-len(sizes) :], sizes, strict=True)
            shape[-len(sizes) :] = [ceil(length / size) * size for length, size in tiled]
        return ceil(prod(shape) * bits_of(self.dtype) / 8)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    argument: str  # the text between the parentheses: a constant's value, a parameter's number
    attributes: str
    root: bool
    peers: Mapping[str, "Instruction"] = field(repr=False, compare=False)  # its computation's, by name

    @cached_property
    def inputs(self) -> tuple["Instruction", ...]:
        """What its operands name."""
        return tuple(self.peers[name] for name in self.operands)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that run inside it, reducers included."""
        return tuple(name for _, each in _CALLED.findall(self.attributes) for name in re.findall(r"%([^\s,}]+)", each))

    @cached_property
    def config(self) -> Mapping[str, Any]:
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        value, _ = json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))
        return value

    @cached_property
    def cycles(self) -> int:
        """XLA's estimate, 0 where it gives none."""
        return int(self.config.get("window_config", {}).get("estimated_cycles", 0))

    @cached_property
    def op_name(self) -> str:
        return self.attribute(r'metadata=\{[^}]*?op_name="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        return _first(pattern, self.attributes)


@dataclass(frozen=True, kw_only=True)
class Computation:
    entry: bool
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.root)

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {int(each.argument): each for each in self.instructions.values() if each.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        users: dict[str, list[Instruction]] = {}
        for each in self.instructions.values():
            for name in dict.fromkeys(each.operands):
                users.setdefault(name, []).append(each)
        return {name: tuple(found) for name, found in users.items()}


@dataclass(frozen=True, kw_only=True)
class Module:
    computations: Mapping[str, Computation]
    partitions: int
    _inside: dict[str, tuple[Instruction, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def entry(self) -> Computation:
        return next(each for each in self.computations.values() if each.entry)

    def inside(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Everything that a fusion or another caller holds, nested fusions too."""
        found: list[Instruction] = []
        for name in instruction.called:
            if name not in self._inside:
                parts = self.computations[name].instructions.values()
                self._inside[name] = tuple(each for part in parts for each in (part, *self.inside(part)))
            found.extend(self._inside[name])
        return tuple(found)

    def flops(self, instruction: Instruction) -> float:
        """Those of the matmuls that it is or holds."""
        parts = self.inside(instruction) if instruction.opcode == "fusion" else (instruction,)
        return sum((matmul_flops(each) for each in parts if each.opcode in MATMULS), 0.0)


def bits_of(dtype: str) -> int:
    """Bits of one element: bf16 -> 16, s4 -> 4, f8e4m3fn -> 8."""
    bits = _BITS[dtype] if dtype in _BITS else _first(r"^[a-z]+(\d+)", dtype)
    assert bits != "", f"element type {dtype}"
    return int(bits)


def parse(text: str) -> Module:
    """The module that a compiler printed. Raises InputError for text that is none."""
    if not text.startswith("HloModule"):
        raise InputError("HLO: the text does not start with HloModule; give what compiled.as_text() returns")
    computations: dict[str, Computation] = {}
    header: re.Match[str] | None = None
    body: dict[str, Instruction] = {}
    for line in _lines(text):
        if _CLOSING.match(line):
            assert header, "a brace closes no computation"
            computations[header[2]] = Computation(entry=bool(header[1]), instructions=body)
            header, body = None, {}
        elif header is None:
            header = _HEADER.match(line)
        elif _NAME.match(line):
            instruction = _instruction(line, body)
            body[instruction.name] = instruction
    return Module(computations=computations, partitions=int(_first(r"num_partitions=(\d+)", text[:100_000]) or 1))


def _lines(text: str) -> Iterator[str]:
    """Logical lines: a Mosaic call is printed over several."""
    held = ""
    for line in text.splitlines():
        if _CLOSING.match(line) or _NAME.match(line) or _HEADER.match(line):
            if held:
                yield held
            held = line
        elif held.startswith("  "):
            held += line
    if held:
        yield held


def _instruction(line: str, peers: Mapping[str, Instruction]) -> Instruction:
    name = _NAME.match(line)
    assert name
    end = _closing(line, name.end()) + 1 if line[name.end()] == "(" else line.index(" ", name.end())
    kind = line[name.end() : end]
    begin = line.index("(", end)
    close = _closing(line, begin)
    argument = line[begin + 1 : close]
    return Instruction(
        name=name[2],
        opcode=line[end + 1 : begin],
        arrays=tuple(
            Array(
                dtype=found[1],
                shape=tuple(int(size.removeprefix("<=")) for size in found[2].split(",") if size),
                layout=found[3] or "",
            )
            for found in _ARRAY.finditer(kind)
        ),
        operands=tuple(_OPERAND.findall(argument)),
        argument=argument,
        attributes=line[close + 1 :],
        root=bool(name[1]),
        peers=peers,
    )


def _closing(line: str, begin: int) -> int:
    depth = 0
    for found in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(line, begin):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise AssertionError(f"no closing parenthesis: {line[:80]}")


def matmul_flops(instruction: Instruction) -> float:
    """2 x the multiplications that the result needs; positions that a window takes from its padding are not counted."""
    left, right = (each.arrays[0].shape for each in instruction.inputs[:2])
    out = instruction.arrays[0].shape
    if instruction.opcode == "dot":
        axes = [int(axis) for axis in instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}").split(",") if axis]
        return 2.0 * prod(out) * prod(left[axis] for axis in axes)
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute(r"dim_labels=([^,\s]+)"))
    assert labels, f"convolution without labels: {instruction.name}"
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", instruction.attribute(r"window=\{([^}]*)\}")))
    pairs = 1
    for label in sorted(set(labels[2]) - {"i", "o"}):
        sizes = (left[labels[1].index(label)], right[labels[2].index(label)], out[labels[3].index(label)])
        pairs *= _valid_pairs(sizes, {key: value.split("x")[int(label)] for key, value in window.items()})
    features = right[labels[2].index("i")]
    return 2.0 * pairs * features * out[labels[3].index("b")] * out[labels[3].index("f")]


def _valid_pairs(sizes: tuple[int, int, int], window: Mapping[str, str]) -> int:
    """How many pairs of an output and a window position of one axis meet an input element."""
    length, kernel, out = sizes
    stride, spread, dilation = (int(window.get(key, 1)) for key in ("stride", "rhs_dilate", "lhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    if low == 0 and dilation == 1 and (out - 1) * stride + (kernel - 1) * spread < length:
        return out * kernel
    last = (length - 1) * dilation
    pairs = 0
    for position in range(kernel):
        first = position * spread - low
        places = range(first, first + out * stride, stride)
        pairs += sum(0 <= place <= last and place % dilation == 0 for place in places)
    return pairs


def trip_count(loop: Instruction, module: Module) -> int | None:
    """How often a while loop runs; None where its text does not say."""
    known = loop.attribute(r'known_trip_count[^}]*?"?n"?\D+(\d+)')
    if known:
        return int(known)
    condition = module.computations[loop.attribute(r"condition=%([^\s,]+)")]
    body = module.computations[loop.attribute(r"body=%([^\s,]+)")]
    compared = _comparison(condition, module)
    if compared is None or compared[0] not in ("LT", "LE"):
        return None
    direction, counter, limit = compared
    start, end = (_carried(each, loop.inputs[0]) for each in (counter, limit))
    if start is None or end is None:
        return None
    step = _step(counter, body, module)
    return max(0, ceil((end - start + (direction == "LE")) / step)) if step else None


def _comparison(condition: Computation, module: Module) -> tuple[str, Instruction, Instruction] | None:
    root = condition.root
    if root.opcode == "compare":
        return root.attribute(r"direction=(\w+)"), root.inputs[0], root.inputs[1]
    if root.opcode != "fusion":
        return None
    body = module.computations[root.called[0]]
    if body.root.opcode != "compare":
        return None
    places = {each.name: root.inputs[number] for number, each in body.parameters.items()}
    left, right = map(places.get, body.root.operands)
    return (body.root.attribute(r"direction=(\w+)"), left, right) if left and right else None


def _carried(compared: Instruction, start: Instruction) -> int | None:
    """The number that a side of the condition begins with: a constant, or what the loop's tuple carries there."""
    if compared.opcode == "get-tuple-element" and start.opcode == "tuple":
        return _number(start.inputs[int(compared.attribute(r"index=(\d+)"))])
    return _number(compared)


def _number(instruction: Instruction) -> int | None:
    while instruction.opcode in _COPIES:
        instruction = instruction.inputs[0]
    is_number = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.argument)
    return int(instruction.argument) if is_number else None


def _step(counter: Instruction, body: Computation, module: Module) -> int | None:
    """What one turn adds to the counter; None where the body does not say."""
    index = counter.attribute(r"index=(\d+)")
    if body.root.opcode != "tuple" or not index:
        return None
    added = body.root.inputs[int(index)]
    while added.opcode in (*_COPIES, "fusion"):
        added = module.computations[added.called[0]].root if added.opcode == "fusion" else added.inputs[0]
    if added.opcode != "add":
        return None
    return next((number for number in map(_number, added.inputs) if number is not None), None)


def kernel_flops(call: Instruction) -> float | None:
    """FLOPs of one call by the kernel's own estimate, or what is known of splash, grouped matmuls, ours; else None."""
    estimate = call.config.get("custom_call_config", {}).get("cost_estimate", {})
    if int(estimate.get("flops", 0)) > 0:
        return float(estimate["flops"])
    used = [array for each in call.inputs for array in each.arrays]
    if not any(array.dtype[0] in "bfc" for array in (*used, *call.arrays)):
        return 0.0  # only integers: a table for another kernel
    if call.name.startswith("heads_"):
        return 0.0  # gemsmith.models.splash: bound by its bytes
    if call.name.startswith("splash_"):
        return _splash(call)
    if call.name.startswith(("gmm", "tgmm")):
        # Each of m rows meets one group's matrix, so 2 m k n whatever the groups.
        left, right = [array.shape for array in used if array.dtype[0] in "bf"][:2]
        width = call.arrays[0].shape[-1] if call.name.startswith("gmm") else right[-1]
        return 2.0 * prod(left) * width
    return None


def _splash(call: Instruction) -> float:
    """Score blocks that run x products x 2 x block area x head_dim.

    The mask's table is (heads or 1, rows of blocks, width): width is the most blocks that any row visits. Row i of a
    causal mask, windowed or not, visits min(width, those up to its diagonal). Of queries split over chips the last part
    is taken, which sees the most keys.
    """
    kind = _first(r"^splash_m[hq]a_(fwd|dq|dkv)", call.name)
    assert kind, f"splash kernel {call.name}"
    arrays = [each.arrays[0] for each in call.inputs]
    table = next(array for array in arrays if array.dtype.startswith("s") and len(array.shape) == 3)
    query, key = [array for array in arrays if array.dtype[0] in "bf" and len(array.shape) >= 2][:2]
    *rows, length, width = query.shape
    blocks, span = table.shape[1:]
    block = call.attribute(rf'\\"{_BLOCKS[kind]}\\": (\d+)')
    assert block, f"{call.name} does not say {_BLOCKS[kind]}"
    if kind == "dkv":
        span, blocks = blocks, span
        block_kv, block_q = key.shape[-2] // blocks, int(block)
        visited = [min(span, ceil((key.shape[-2] - at * block_kv) / block_q)) for at in range(blocks)]
    else:
        block_q, block_kv = length // blocks, int(block)
        before = key.shape[-2] - length
        visited = [min(span, ceil((before + (at + 1) * block_q) / block_kv)) for at in range(blocks)]
    fused = kind == "dkv" and '\\"use_fused_bwd_kernel\\": true' in call.attributes
    products = _PRODUCTS["fused" if fused else kind]
    return 2.0 * products * prod(rows) * sum(visited) * block_q * block_kv * width
