"""How much memory a pass through a traced model takes in addition to its weights."""

from collections.abc import Iterable

from foretoken.profiler.graph.trace import Trace, TracedCall

# What may return its input as another view, and mostly does.
_MOSTLY_VIEWS = ("aten.reshape", "aten.contiguous", "aten.to.", "aten.dropout", "aten.alias")


def pass_bytes(trace: Trace, *, has_backward: bool) -> float:
    """Return the bytes that a pass holds at its peak, weights and their gradients not counted.

    With a backward pass all that calls make is kept for it; without, as long as it is read.
    """
    made = {call.name: _made_bytes(call) for call in trace.calls}
    if has_backward:
        # The last result and its gradient are there together.
        last = max((made[name] for name in trace.output_names if name in made), default=0)
        return float(sum(made.values()) + last)
    return _peak_bytes(trace, made)


def _peak_bytes(trace: Trace, made: dict[str, int]) -> float:
    last_reader = {name: len(trace.calls) for name in trace.output_names}
    owner: dict[str, str] = {}
    for index, call in enumerate(trace.calls):
        sources = [owner.get(shape.name, shape.name) for shape in call.inputs]
        owner[call.name] = call.name if made[call.name] or not sources else sources[0]
        for name in sources:
            last_reader[name] = max(last_reader.get(name, index), index)
    held = peak = 0
    ends = _by_end(last_reader)
    for index, call in enumerate(trace.calls):
        held += made[call.name]
        peak = max(peak, held)
        held -= sum(made.get(name, 0) for name in ends.get(index, ()))
    return float(peak)


def _by_end(last_reader: dict[str, int]) -> dict[int, list[str]]:
    ends: dict[int, list[str]] = {}
    for name, index in last_reader.items():
        ends.setdefault(index, []).append(name)
    return ends


def _made_bytes(call: TracedCall) -> int:
    if getattr(call.target, "is_view", False):
        return 0
    sizes = [shape.num_bytes for shape in call.outputs]
    if str(call.target).startswith(_MOSTLY_VIEWS) and _keeps_size(call, sizes):
        return 0
    return sum(sizes)


def _keeps_size(call: TracedCall, sizes: Iterable[int]) -> bool:
    return bool(call.inputs) and list(sizes) == [call.inputs[0].num_bytes]
