"""What a compiled TPU program moves: bytes between HBM and the core, bytes between chips. Read from its scheduled HLO.

XLA's own cost analysis counts on-chip memory as well, and knows nothing of the interconnect. Here each instruction of
the schedule reads its operands and writes its results once, each with the padding of its tiles, as far as they lie in
HBM; a fusion that only slices an operand reads the slices, and an update in place moves the update. Scalars in scalar
memory and what stays in VMEM are free.
"""

import collections
import dataclasses
import math
import re
import typing

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "bf16": 2, "token": 0, "opaque": 0}
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id"}
_HBM = 0
# Instructions that update their first operand in place, and the position of the update.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OPCODE = re.compile(r"\s*([a-z][a-z\d\-]*)\(")


@dataclasses.dataclass
class Array:
    """An array of a compiled program."""

    bytes: int  # with the padding of its tiles
    memory_space: int

    @property
    def hbm(self):
        return self.bytes if self.memory_space == _HBM else 0


@dataclasses.dataclass
class Instruction:
    name: str
    opcode: str
    arrays: list  # of Array: the result, flattened
    operands: list  # of names
    attributes: str
    is_root: bool
    value: typing.Any  # an int: of an integer constant, or the number of a parameter or of a tuple's element; else None

    def called(self, attribute):
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found and found.group(1)


@dataclasses.dataclass
class Traffic:
    """Bytes and counts of one run of a program on one chip."""

    hbm_read: int = 0
    hbm_written: int = 0
    collective_hbm: int = 0  # what collectives read from and write to HBM
    interconnect: int = 0  # bytes that a chip sends, with the collectives on a ring
    cycles: int = 0  # XLA's estimate for its fusions, without the collectives
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    payload: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # bytes by kind of collective

    @property
    def hbm(self):
        return self.hbm_read + self.hbm_written

    @property
    def total(self):
        """Bytes to and from HBM, for computation and collectives."""
        return self.hbm + self.collective_hbm

    def add(self, other, times=1):
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, collections.Counter):
                for key, value in theirs.items():
                    mine[key] += times * value
            else:
                setattr(self, field.name, mine + times * theirs)


def parse_arrays(shape):
    """The arrays of the text of a shape, a tuple's in order."""
    return [_array(*match.groups()) for match in _ARRAY.finditer(shape)]


def _array(kind, dimensions, layout):
    dimensions = [int(d) for d in dimensions.split(",") if d]
    size = _BYTES[kind] if kind in _BYTES else int(re.match(r"[sufc](\d+)", kind).group(1)) / 8
    order, _, rest = (layout or "").partition(":")
    tile = re.search(r"T\(([\d,]+)\)", rest)
    if tile and dimensions:
        minor_to_major = [int(d) for d in order.split(",") if d]
        # The last number of a tile pads the minor-most dimension.
        for dimension, length in zip(minor_to_major, reversed(tile.group(1).split(","))):
            dimensions[dimension] = -(-dimensions[dimension] // int(length)) * int(length)
    space = re.search(r"S\((\d+)\)", rest)
    return Array(int(math.prod(dimensions) * size), int(space.group(1)) if space else _HBM)


def parse(text):
    """`(computations, entry)` of the text of an HLO module: lists of instructions by name, and the entry's name."""
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(f"Expected the text of a scheduled HLO module. Received: {text[:200]!r}")
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = computations[header.group(2)] = []
            entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (start := _INSTRUCTION.match(line)):
            current.append(_instruction(line, start))
    return computations, entry


def _instruction(line, start):
    shape, rest = _split_shape(line[start.end() :])
    opcode = _OPCODE.match(rest)
    arguments, attributes = _split_parentheses(rest[opcode.end() - 1 :])
    value = arguments
    if opcode.group(1) == "get-tuple-element":
        value = re.search(r"\bindex=(\d+)", attributes).group(1)
    return Instruction(
        name=start.group(2),
        opcode=opcode.group(1),
        arrays=parse_arrays(shape),
        operands=re.findall(r"%([\w.\-]+)", arguments),
        attributes=attributes,
        is_root=bool(start.group(1)),
        value=int(value) if re.fullmatch(r"-?\d+", value) else None,
    )


def _split_shape(text):
    if text.startswith("("):
        inner, rest = _split_parentheses(text)
        return inner, rest
    end = re.match(r"\S+", text).end()
    return text[:end], text[end:]


def _split_parentheses(text):
    """What stands in the parentheses that `text` begins with, and what follows."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:i], text[i + 1 :]
    raise ValueError(f"Expected balanced parentheses. Received: {text[:200]!r}")


def traffic(text):
    """The `Traffic` of one run of a scheduled module, from its text.

    Of a conditional the branch that moves most counts. The body of a loop counts as often as it runs.

    Raises:
        ValueError: if the module is not scheduled, or a loop's number of runs is unknown.
    """
    computations, entry = parse(text)
    return _traffic_of(computations, computations[entry], _replicas(text))


def _replicas(text):
    found = re.search(r"replica_count=(\d+)", text.partition("\n")[0])
    return int(found.group(1)) if found else 1


def _traffic_of(computations, instructions, replicas):
    result = Traffic()
    arrays = {instruction.name: instruction.arrays for instruction in instructions}
    for instruction in instructions:
        operands = [arrays.get(name, []) for name in instruction.operands]
        result.add(_traffic_of_instruction(computations, instructions, instruction, operands, replicas))
    return result


def _traffic_of_instruction(computations, instructions, instruction, operands, replicas):
    result, opcode = Traffic(), instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or opcode.endswith("-update"):
        return result
    if opcode == "custom-call" and '"ConcatBitcast"' in instruction.attributes:
        return result
    if opcode in ("while", "conditional", "call"):
        return _traffic_of_control_flow(computations, instructions, instruction, replicas)
    collective = _collective(computations, instruction)
    if collective:
        return _traffic_of_collective(instruction, collective, operands, replicas)
    read, written = _reads_and_writes(computations, instruction, operands)
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    result.hbm_read, result.hbm_written = read, written
    result.cycles = int(cycles.group(1)) if cycles else 0
    return result


def _traffic_of_control_flow(computations, instructions, instruction, replicas):
    def of(name):
        return _traffic_of(computations, computations[name], replicas)

    result = Traffic()
    if instruction.opcode == "while":
        runs = _runs_of_loop(computations, instructions, instruction)
        if runs is None:
            raise ValueError(f"Expected loops that run a known number of times. Received: {instruction.name}")
        result.add(of(instruction.called("body")), runs)
    elif instruction.opcode == "call":
        result.add(of(instruction.called("to_apply")))
    else:
        listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        if listed:
            branches = re.findall(r"%?([\w.\-]+)", listed.group(1))
        else:
            branches = [instruction.called("true_computation"), instruction.called("false_computation")]
        result.add(max((of(name) for name in branches), key=lambda branch: branch.total))
    return result


def _runs_of_loop(computations, instructions, loop):
    """How often a loop runs that counts up by a constant while it is less than another; None for others.

    XLA knows it, but the text of a scheduled module for TPUs does not say it.
    """
    body, condition = computations[loop.called("body")], computations[loop.called("condition")]
    initial, results, test = _source(instructions, loop.operands[0]), _root(body), _root(condition)
    if (initial.opcode, results.opcode, test.opcode) != ("tuple", "tuple", "compare"):
        return None

    def carried(inside, name):
        """Which of the elements that the loop carries an array is; None if it is none."""
        source = _source(inside, name)
        is_carried = source.opcode == "get-tuple-element" and _source(inside, source.operands[0]).opcode == "parameter"
        return source.value if is_carried else None

    def constant(inside, name):
        element = carried(inside, name)
        if element is not None and carried(body, results.operands[element]) == element:
            inside, name = instructions, initial.operands[element]
        source = _source(inside, name)
        return source.value if source.opcode == "constant" else None

    counter = carried(condition, test.operands[0])
    if counter is None or "direction=LT" not in test.attributes:
        return None
    following = _source(body, results.operands[counter])
    steps = [name for name in following.operands if carried(body, name) != counter]
    if following.opcode != "add" or len(steps) != 1:
        return None
    first, step = constant(instructions, initial.operands[counter]), constant(body, steps[0])
    limit = constant(condition, test.operands[1])
    if None in (first, step, limit) or step <= 0:
        return None
    return max(0, -(-(limit - first) // step))


def _root(instructions):
    [root] = [instruction for instruction in instructions if instruction.is_root]
    return root


def _source(instructions, name):
    """The instruction that an array comes from, before copies."""
    by_name = {instruction.name: instruction for instruction in instructions}
    while by_name[name].opcode in ("bitcast", "copy"):
        name = by_name[name].operands[0]
    return by_name[name]


def _collective(computations, instruction):
    """`(kind, attributes)` of the collective that an instruction is, or holds; None for others."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in COLLECTIVES:
        return opcode, instruction.attributes
    if opcode not in ("fusion", "async"):
        return None
    name = instruction.called("calls")
    inner = computations[name]
    held = [collective for i in inner if (collective := _collective(computations, i))]
    if not held:
        return None
    kind, attributes = held[0]
    # XLA for TPUs writes reduce-scatter as a fusion of an all-reduce with a slice of its result.
    if kind == "all-reduce":
        if name.startswith("all-reduce-scatter") or any(i.opcode == "dynamic-slice" for i in inner):
            kind = "reduce-scatter"
        elif name.startswith("all-gather") or any(i.opcode == "dynamic-update-slice" for i in inner):
            kind = "all-gather"
    return kind, attributes


def _traffic_of_collective(instruction, collective, operands, replicas):
    result, (kind, attributes) = Traffic(), collective
    read = [array for arrays in operands for array in arrays]
    written = instruction.arrays
    if instruction.opcode.endswith("-start") and len(written) > len(read):
        # The result of a start holds its operands, the results, and semaphores.
        written = written[len(read) : 2 * len(read)]
    payload = max(sum(array.bytes for array in read), sum(array.bytes for array in written))
    result.collectives[kind] += 1
    result.payload[kind] += payload
    result.collective_hbm = sum(array.hbm for array in [*read, *written])
    result.interconnect = payload
    if kind != "collective-permute":
        size = _group_size(attributes, replicas)
        result.interconnect = int(payload * (2 if kind == "all-reduce" else 1) * (size - 1) / size)
    return result


def _group_size(attributes, replicas):
    """How many replicas take part in one collective; all of them where no groups are listed."""
    groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", attributes)
    if not groups:
        return replicas
    listed, size = groups.groups()
    return len(listed.split(",")) if listed else int(size)


def _reads_and_writes(computations, instruction, operands):
    """Bytes that an instruction reads from HBM and writes to it."""
    opcode, arrays = instruction.opcode, instruction.arrays
    sizes = [sum(array.hbm for array in operand) for operand in operands]
    written = sum(array.hbm for array in arrays)
    if opcode == "copy-start":  # (destination, source, context)
        return sizes[0], arrays[0].hbm
    if opcode.endswith("-start"):  # ((operands), results, context)
        results = arrays[len(operands) :]
        moved = sum(array.bytes for array in results)
        return sum(min(size, moved) for size in sizes), sum(array.hbm for array in results)
    if opcode in ("slice", "dynamic-slice", "gather"):
        return min(sizes[0], sum(array.bytes for array in arrays)) + sum(sizes[1:]), written
    if opcode == "dynamic-update-slice":
        return sum(sizes[1:]), min(written, sum(array.bytes for array in operands[1]))
    if opcode == "fusion":
        inner = computations[instruction.called("calls")]
        read = sum(_read_of_operand(inner, i, size) for i, size in enumerate(sizes))
        return read, _written_by(inner, arrays)
    return sum(sizes), written


def _read_of_operand(inner, index, size):
    """Of `size` bytes of an operand of a fusion, those that it reads: the slices, where it reads only slices."""
    by_name = {instruction.name: instruction for instruction in inner}
    names = {
        instruction.name for instruction in inner if instruction.opcode == "parameter" and instruction.value == index
    }
    read = 0
    for instruction in inner:
        if names.isdisjoint(instruction.operands):
            continue
        if instruction.opcode == "bitcast":
            names.add(instruction.name)
        elif not names.isdisjoint(instruction.operands[1:]):
            return size
        elif instruction.opcode in ("slice", "dynamic-slice", "gather"):
            read += sum(array.bytes for array in instruction.arrays)
        elif instruction.opcode == "scatter":
            read += _bytes_of_update(by_name, instruction)  # It combines them with what is there.
        elif instruction.opcode != "dynamic-update-slice":
            return size
    return min(size, read)


def _written_by(inner, arrays):
    """Of a fusion's results, the bytes that it writes to HBM: the updates, where it updates an operand in place."""
    by_name = {instruction.name: instruction for instruction in inner}
    root = _root(inner)
    names = root.operands if root.opcode == "tuple" else [root.name]
    if len(names) != len(arrays):  # of an instruction with more than one result
        return sum(array.hbm for array in arrays)
    written = 0
    for name, array in zip(names, arrays, strict=True):
        result = _source(inner, name)
        in_place = result.opcode in _UPDATES and _source(inner, result.operands[0]).opcode == "parameter"
        written += min(array.hbm, _bytes_of_update(by_name, result)) if in_place else array.hbm
    return written


def _bytes_of_update(by_name, instruction):
    return sum(array.bytes for array in by_name[instruction.operands[_UPDATES[instruction.opcode]]].arrays)
