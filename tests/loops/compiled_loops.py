"""Instructions in a compiled program's loops, read from its HLO: copies, host transfers."""

import re
from collections.abc import Iterable, Iterator

# "%name (parameters) -> type {", or "ENTRY %name …".
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
# "name = f32[1,2]{1,0} copy(…": type and shape of the first result, and the operation.
_INSTRUCTION = re.compile(r"= \(?(\w+)\[([\d,]*)\][^=]*? ([\w\-]+)\(")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|\w+_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_COPIES = ("copy", "copy-start", "transpose")
_TO_HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")


def loop_instructions(program: str) -> Iterator[str]:
    """Yields the lines of the bodies of while loops in optimized HLO, and of what they call."""
    computations = _computations(program)
    for name in _in_loops(program, computations):
        yield from computations[name]


def cache_copies(program: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Returns the HLO lines in loops that copy an array of one of ``shapes``, in any layout.

    Axes of length 1 and the order of axes are ignored: a transposed copy is a copy. A copy inside a
    fusion with another result is not counted, since it is never written, nor is a move between two
    memories of a chip, which XLA overlaps with computation.
    """
    wanted = {_essence(shape) for shape in shapes}
    computations = _computations(program)
    # Computations of fusions, which write only the result of their root.
    fused = {name for name in computations if f"calls=%{name}" in program}
    found = []
    for name in _in_loops(program, computations, without=fused):
        for line in computations[name]:
            written, match = _root(line, computations), _INSTRUCTION.search(line)
            is_copy = _operation(written) in _COPIES and not _is_move(written)
            if match and _dims(match) in wanted and is_copy:
                found.append(line.strip())
    return found


def host_transfers(program: str) -> list[str]:
    """Returns the HLO lines in loops that transfer to the host: feeds, sends, Python callbacks."""
    found = []
    for line in loop_instructions(program):
        match = re.search(r" ([\w\-]+)\(", line)
        python = "custom-call" in line and "callback" in line
        if python or (match and match[1] in _TO_HOST):
            found.append(line.strip())
    return found


def _computations(program: str) -> dict[str, list[str]]:
    computations, name = {}, None
    for line in program.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            name = match[1]
            computations[name] = []
        elif name is not None and line.startswith("}"):
            name = None
        elif name is not None:
            computations[name].append(line)
    return computations


def _in_loops(program: str, computations, without=frozenset()) -> list[str]:
    """Returns names of loop bodies and of what they call, not entering those in ``without``."""
    bodies = re.findall(r"while\(.*?body=%?([\w.\-]+)", program)
    reached, waiting = set(), list(bodies)
    while waiting:
        name = waiting.pop()
        if name not in reached and name not in without:
            reached.add(name)
            waiting += [called for line in computations[name] for called in _called(line)]
    return sorted(reached)


def _root(line: str, computations: dict[str, list[str]]) -> str:
    """Returns the line or, if it is a fusion, the fusion's root instruction."""
    while _operation(line) == "fusion":
        (name,) = _called(line)
        line = next(inner for inner in computations[name] if inner.strip().startswith("ROOT "))
    return line


def _is_move(line: str) -> bool:
    """Returns True if an asynchronous copy only changes the memory space of a layout."""
    match = re.search(
        r"= \((\w+\[[\d,]*\]\{[^}]*\}), (\w+\[[\d,]*\]\{[^}]*\}),.* copy-start\(", line
    )
    return (
        match is not None and len({re.sub(r"S\(\d+\)", "", side) for side in match.groups()}) == 1
    )


def _operation(line: str) -> str | None:
    match = _INSTRUCTION.search(line)
    return match and match[3]


def _dims(match: re.Match) -> tuple[int, ...]:
    return _essence(tuple(int(dim) for dim in match[2].split(",") if dim))


def _called(line: str) -> list[str]:
    groups = [one or several for one, several in _CALLED.findall(line)]
    names = [name for group in groups for name in group.split(",")]
    return [name.strip().lstrip("%") for name in names]


def _essence(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in shape if dim != 1))
