"""Bytes that one operation reads from and writes to a chip's memory: of what a fusion slices, only the slice."""

from gemsmith.aot.hlo import HBM, Array, Computation, Instruction, Module

_ALIASES = ("bitcast", "reshape", "get-tuple-element")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {
    "dynamic-update-slice": 1,
    "scatter": 2,
}  # place of the update among the operands; operand 0 is changed where it lies
_UNREAD = ("tuple", "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def traffic_of(each: Instruction, home: Computation, module: Module) -> int:
    """Bytes read and written in the chip's own memory; arrays in on-chip memory and on the host cost none."""
    if each.opcode == "fusion":
        body = module.computations[each.called[0]]
        read = sum(
            _read(body.parameters[place], body, home.instructions[name], module)
            for place, name in enumerate(each.operands)
        )
        return read + sum(
            _written(*pair, body=body, module=module) for pair in zip(_results(body), each.arrays, strict=True)
        )
    arrays = {name: home.instructions[name].arrays for name in each.operands}
    written = sum(map(_in_hbm, each.arrays))
    if each.opcode in _SLICES:
        source = home.instructions[each.operands[0]].arrays[0]
        return written + (min(source.bytes, each.arrays[0].bytes) if source.space == HBM else 0)
    if each.opcode in _UPDATES:
        update = home.instructions[each.operands[_UPDATES[each.opcode]]].arrays[0]
        return _in_hbm(update) + (update.bytes if each.arrays[0].space == HBM else 0)
    return written + sum(_in_hbm(array) for name in each.operands for array in arrays[name])


def _in_hbm(array: Array) -> int:
    return array.bytes if array.space == HBM else 0


def _read(parameter: Instruction, body: Computation, source: Instruction, module: Module) -> int:
    if len(source.arrays) != 1 or source.arrays[0].space != HBM:
        return 0
    return min(source.arrays[0].bytes, _used(parameter, body, module))


def _used(value: Instruction, body: Computation, module: Module) -> int:
    """Bytes of a value that a fusion's computation looks at."""
    total = 0
    for user in body.users.get(value.name, ()):
        if user.opcode in _ALIASES:
            total += _used(user, body, module)
        elif user.opcode in _SLICES and user.operands[0] == value.name:
            total += user.arrays[0].bytes
        elif (
            (user.opcode in _UPDATES and user.operands[0] == value.name)
            or user.opcode in _UNREAD
            or "AsyncCollective" in user.attributes
        ):
            continue
        elif user.opcode == "fusion":
            inner = module.computations[user.called[0]]
            total += sum(
                _used(inner.parameters[at], inner, module)
                for at, name in enumerate(user.operands)
                if name == value.name
            )
        else:
            return value.arrays[0].bytes
    return total


def _results(body: Computation) -> list[Instruction]:
    root = body.root
    return [body.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root] * len(root.arrays)


def _written(result: Instruction, array: Array, *, body: Computation, module: Module) -> int:
    """Bytes of one result that are new: an update's, where a buffer is changed in place, none of a passed parameter."""
    if array.space != HBM:
        return 0
    while result.opcode in _ALIASES:
        result = body.instructions[result.operands[0]]
    if result.opcode == "parameter" or result.opcode in _UNREAD:
        return 0
    if result.opcode in _UPDATES:
        return body.instructions[result.operands[_UPDATES[result.opcode]]].arrays[0].bytes
    if result.opcode == "fusion" and len(result.arrays) == 1:
        inner = module.computations[result.called[0]]
        return _written(inner.root, array, body=inner, module=module)
    return array.bytes
