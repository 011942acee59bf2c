"""Times of a measured module at a micro batch, and which operators of a graph share them."""

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.training_truth import ModuleTime, ModuleTimes
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.training.module_name import (
    Module,
    find_module,
    missing_pieces,
    role_module,
    split_layer,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Times of a module for one micro batch in one layer, in µs; a backward NaN: not measured."""

    forward_us: float
    backward_us: float
    communication_us: float


def read_times(times: Sequence[ModuleTime], micro_batch_size: int) -> PassTimes:
    """Return what a module takes with a micro batch; repeated times are averaged.

    Between two profiled micro batches a time is on the line through both, which is exact for a
    fixed part and one per sample. Outside of them the time per sample stays that of the nearest.
    """
    points = [
        (size, _mean([time for time in times if time.micro_batch_size == size]))
        for size in sorted({time.micro_batch_size for time in times})
    ]
    sizes = [size for size, _ in points]
    place = bisect.bisect_left(sizes, micro_batch_size)
    if place == 0 or place == len(points):
        size, nearest = points[min(place, len(points) - 1)]
        return _combine([nearest], [micro_batch_size / size])
    (small, below), (large, above) = points[place - 1], points[place]
    share = (micro_batch_size - small) / (large - small)
    return _combine([below, above], [1 - share, share])


def add_times(parts: Sequence[PassTimes]) -> PassTimes:
    """Return the sum of several times."""
    return _combine(parts, [1.0] * len(parts))


def mean_times(parts: Sequence[PassTimes]) -> PassTimes:
    """Return the mean of several times."""
    return _combine(parts, [1 / len(parts)] * len(parts))


def _mean(times: Sequence[ModuleTime]) -> PassTimes:
    return mean_times(
        [
            PassTimes(
                forward_us=time.forward_us,
                backward_us=time.backward_us or math.nan,
                communication_us=time.communication_us,
            )
            for time in times
        ]
    )


def _combine(parts: Sequence[PassTimes], weights: Sequence[float]) -> PassTimes:
    return PassTimes(
        **{
            field.name: sum(
                getattr(part, field.name) * weight
                for part, weight in zip(parts, weights, strict=True)
            )
            for field in fields(PassTimes)
        }
    )


Role = tuple[Section, str]
# The first node of every role, in the order of a forward pass.
Roles = Mapping[Role, OperatorNode]
# Times of one module by the name of the piece and the layer.
_Pieces = dict[tuple[str, int], list[ModuleTime]]
_SECTIONS = (Section.EMBEDDING, Section.LAYER, Section.HEAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModule:
    """A module of a profile: its place in the graph, and its times by layer (-1: any)."""

    names: tuple[str, ...]
    module: Module
    by_layer: Mapping[int, PassTimes]

    def time_in(self, layer: int) -> PassTimes:
        """Return its times in a layer: that layer's own, else the mean of all."""
        found = self.by_layer.get(layer) or self.by_layer.get(-1)
        return found or mean_times(list(self.by_layer.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Roles that share the time of a module; `holds_gaps`: and all the host leaves between."""

    module: MeasuredModule
    roles: frozenset[Role]
    holds_gaps: bool = False


def ordered_roles(forward: Nodes) -> Roles:
    """Return the first node of every role in the order of a forward pass."""
    roles: dict[Role, OperatorNode] = {}
    for node in forward:
        roles.setdefault((node.section, node.role), node)
    return roles


def is_collective(node: OperatorNode) -> bool:
    """Return whether a node communicates."""
    return find_operator(node.operator).is_collective


def is_measurable(node: OperatorNode) -> bool:
    """Return whether a module's time can hold a node: what a rank computes, its group's sums."""
    return not is_collective(node) or node.axis == "tp"


def read_modules(
    roles: Roles, scenario: TrainingScenario, times: ModuleTimes
) -> tuple[list[MeasuredModule], list[str]]:
    """Return the modules of a profile, pieces put together, and notes on what was left out.

    Raises:
        InvalidRequestError: a module is none of this model's, or only a part of one.

    """
    found: dict[Module, _Pieces] = {}
    notes: dict[str, None] = {}
    for time in times.times:
        name, layer = split_layer(time.module)
        module = _find(name, roles)
        if module is None:
            _refuse(time.module, f"is no module of {scenario.model.name} that is known here")
        elif time.is_whole and times.tp > 1:
            notes[
                f"module times {times.source}: {time.module} ran unsplit on every rank, which the"
                " simulated run does not: left to the predictor"
            ] = None
        else:
            pieces = found.setdefault(replace(module, piece=""), {})
            key = name, layer if time.layer < 0 else time.layer
            pieces.setdefault(key, []).append(time)
    return [_put_together(module, pieces, scenario) for module, pieces in found.items()], list(
        notes
    )


def interval_slots(modules: Sequence[MeasuredModule], roles: Roles) -> list[Slot]:
    """Give each module what runs between the end of the one before and its own end.

    Layers follow each other, so what a layer runs after its last module is in the first one of the
    next: the all-reduce of its MLP.
    """
    slots: list[Slot] = []
    for section in _SECTIONS:
        in_section = _in_section(section, roles)
        ends = {
            _end_place(module.module, in_section, roles): module
            for module in modules
            if module.module.section is section
        }
        start = 0
        found: list[Slot] = []
        for end in sorted(place for place in ends if place >= 0):
            covered = frozenset(in_section[start : end + 1])
            found.append(Slot(module=ends[end], roles=covered, holds_gaps=True))
            start = end + 1
        if found and section is not Section.HEAD:
            found[0] = replace(found[0], roles=found[0].roles | set(in_section[start:]))
        slots += found
    return slots


def module_slots(
    modules: Sequence[MeasuredModule], roles: Roles
) -> tuple[list[Slot], tuple[str, ...]]:
    """Give each module its own operators; return names of modules that are inside of others."""
    spans = [(module, _span(module.module, roles)) for module in modules]
    slots: list[Slot] = []
    inner: list[str] = []
    for module, covered in sorted(spans, key=lambda item: -len(item[1])):
        if any(covered & slot.roles for slot in slots):
            inner += module.names
        elif covered:
            is_layer = module.module.section is Section.LAYER and not module.module.begins
            slots.append(Slot(module=module, roles=covered, holds_gaps=is_layer))
    return slots, tuple(inner)


def _find(name: str, roles: Roles) -> Module | None:
    section = next((section for section, role in roles if role == name), None)
    known = find_module(name) if section is None else role_module(name, section)
    if known is None or not known.ends:
        return known
    is_there = any(_goes_with(role, known.ends) for _, role in roles)
    # A graph of some chunks only need not have the embedding and the head.
    return known if is_there or known.section is not Section.LAYER else None


def _put_together(module: Module, pieces: _Pieces, scenario: TrainingScenario) -> MeasuredModule:
    names = tuple(dict.fromkeys(name for name, _ in pieces))
    known = [find_module(name) for name in names]
    present = frozenset(item.piece for item in known if item is not None and item.piece)
    missing = missing_pieces(present, scenario.model.is_gated)
    if missing:
        lacking = ", ".join(sorted(missing))
        _refuse(names[0], f"is a part of {module.begins[0]}; what lacks is {lacking}")
    curves: defaultdict[int, dict[str, PassTimes]] = defaultdict(dict)
    for (name, layer), times in pieces.items():
        curves[layer][name] = read_times(times, scenario.micro_batch_size)
    by_layer = {layer: _sum_pieces(curves, layer, names) for layer in curves}
    return MeasuredModule(names=names, module=module, by_layer=by_layer)


def _sum_pieces(
    curves: Mapping[int, Mapping[str, PassTimes]], layer: int, names: Sequence[str]
) -> PassTimes:
    """Return the sum of the pieces in a layer; one not timed there is as long as elsewhere."""
    parts = [
        curves[layer].get(name)
        or mean_times([pieces[name] for pieces in curves.values() if name in pieces])
        for name in names
    ]
    return add_times(parts)


def _refuse(module: str, reason: str) -> None:
    raise InvalidRequestError.of_field("module_times", f"{module} {reason}")


def _in_section(section: Section, roles: Roles) -> list[Role]:
    return [role for role, node in roles.items() if role[0] is section and is_measurable(node)]


def _goes_with(role: str, candidates: Sequence[str]) -> bool:
    """Return whether a role is one of these, or something that goes with one (its bias)."""
    return any(role == other or role.startswith(f"{other}_") for other in candidates)


def _end_place(module: Module, in_section: Sequence[Role], roles: Roles) -> int:
    """Return the place of the last thing a module computes, -1 where it computes nothing."""
    places = [
        place
        for place, role in enumerate(in_section)
        if not module.ends or (_goes_with(role[1], module.ends) and not is_collective(roles[role]))
    ]
    return max(places, default=-1)


def _span(module: Module, roles: Roles) -> frozenset[Role]:
    in_section = _in_section(module.section, roles)
    if not module.begins:
        return frozenset(in_section)
    starts = [i for i, (_, role) in enumerate(in_section) if _goes_with(role, module.begins)]
    ends = [i for i, (_, role) in enumerate(in_section) if _goes_with(role, module.ends)]
    if not starts or not ends:
        return frozenset()
    return frozenset(in_section[min(starts) : max(ends) + 1])
