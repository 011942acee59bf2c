"""Measured times of modules in place of the predictor's estimates of their operators.

Operators stay what they are, as memory and FLOPs are counted from them; only their times change. A
module's time is shared among the operators it covers in proportion to their estimates, so that a
breakdown still tells projections from norms. Where a profile holds tensor-parallel collectives,
ours are among the covered: a part of the measured time is theirs, and nothing is added. Modules
that communicate compute as much longer than estimated as those that do not; the rest is theirs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownModelError
from foretoken.domain.lowering.graph import OperatorNode, Overlap, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import Phase
from foretoken.domain.measurements.training_truth import ModuleTimes
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.training.module_slot import (
    PassTimes,
    Role,
    Roles,
    Slot,
    add_times,
    interval_slots,
    is_collective,
    is_measurable,
    module_slots,
    ordered_roles,
    read_modules,
)

# The backward pass of a module computes the gradients of its input and of its weights, each as
# much work as the forward pass. Source: FASOP, which takes 3 x forward for both passes.
_BACKWARD_RATIO = 2.0
_Key = tuple[Section, str, Phase]
Estimate = Callable[[OperatorNode], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPrices:
    """Times of the operators that a profile covers, in µs of one repetition.

    `covers_layers` tells that whole layers were measured, with the gaps the host leaves in them.
    """

    by_key: Mapping[_Key, float] = field(default_factory=dict)
    covers_layers: bool = False
    notes: tuple[str, ...] = ()

    def find(self, node: OperatorNode) -> float | None:
        """Return the time of one repetition of a node; none where the profile says nothing."""
        return self.by_key.get(_key(node))

    def expose(self, nodes: Nodes) -> Nodes:
        """Return the nodes without overlap of what is measured: it is in the time of its module."""
        return tuple(
            node if self.find(node) is None else replace(node, overlap=Overlap.EXPOSED)
            for node in nodes
        )


def check_module_times(scenario: TrainingScenario) -> None:
    """Check that the profile is one of this scenario's model, device, format and sequences.

    Raises:
        InvalidRequestError: it is of another.

    """
    times = scenario.module_times
    if times is None:
        return
    violations = [
        FieldViolation(
            f"module_times.{name}", f"the profile is of {theirs}, the scenario of {ours}"
        )
        for name, theirs, ours in _facts(times, scenario)
        if theirs and theirs != ours
    ]
    if not times.times:
        violations.append(FieldViolation("module_times.times", "there are none"))
    if violations:
        raise InvalidRequestError.of_violations(violations, f"module times {times.source}")


def check_module_layout(scenario: TrainingScenario) -> None:
    """Check that the layout cuts modules as the profile's did.

    Raises:
        InvalidRequestError: it has other tensor-parallel ranks, or splits what the profile has
            whole.

    """
    times = scenario.module_times
    if times is None:
        return
    violations = []
    if times.tp != scenario.layout.tp:
        reason = f"the module times are of {times.tp} tensor-parallel ranks"
        violations.append(FieldViolation("layout.tp", reason))
    if scenario.layout.cp > 1:
        violations.append(FieldViolation("layout.cp", "the module times are of whole sequences"))
    if scenario.weight_parallel:
        reason = "the module times are of weights split by tensor parallelism alone"
        violations.append(FieldViolation("weight_parallel", reason))
    if violations:
        raise InvalidRequestError.of_violations(violations, f"module times {times.source}")


def measure_nodes(
    scenario: TrainingScenario, forward: Nodes, backward: Nodes, estimate_us: Estimate
) -> MeasuredPrices:
    """Return the times of the operators that the scenario's profile covers.

    `forward` and `backward` are the nodes of all chunks, or of one; `estimate_us` is what the
    predictor says of one repetition of a node. Recomputed operators cost what forward ones do.

    Raises:
        InvalidRequestError: a module of the profile is none of this model's, or a part of one.

    """
    times = scenario.module_times
    if times is None:
        return MeasuredPrices()
    roles = ordered_roles(forward)
    modules, left_out = read_modules(roles, scenario, times)
    inner: tuple[str, ...] = ()
    if times.measures == "intervals":
        slots = interval_slots(modules, roles)
    else:
        slots, inner = module_slots(modules, roles)
    notes = [*_describe(times, scenario), *left_out]
    if inner:
        notes.append(f"modules inside of measured ones are in their times: {', '.join(inner)}")
    held = {role for slot in slots if slot.holds_gaps for role in slot.roles}
    covers_layers = {role for role in roles if _is_layer_computation(roles[role])} <= held
    owners = dict(_owners(backward, roles, has_whole_layers=covers_layers))
    passes = _Passes(times, forward, backward, owners, estimate_us)
    passes = replace(passes, slowness=passes.find_slowness(slots))
    by_key: dict[_Key, float] = {}
    for slot in slots:
        by_key |= passes.price_slot(slot)
    return MeasuredPrices(by_key=by_key, covers_layers=covers_layers, notes=tuple(notes))


def _owners(
    backward: Nodes, roles: Roles, *, has_whole_layers: bool
) -> Iterator[tuple[Role, Role]]:
    """Yield the forward role of every backward one: its own without the suffix.

    What else a layer computes goes with its first operator, where whole layers were measured.
    """
    first = next((role for role in roles if _is_layer_computation(roles[role])), None)
    for node in backward:
        name = node.role
        while name and (node.section, name) not in roles:
            name = name.rpartition("_")[0]
        if name:
            yield (node.section, node.role), (node.section, name)
        elif has_whole_layers and first is not None and _is_layer_computation(node):
            yield (node.section, node.role), first


@dataclass(frozen=True, slots=True)
class _Passes:
    """The operators of a micro batch that measured times are shared among.

    `owners` are the forward roles of backward ones; `slowness` is what computation takes over its
    estimate, as far as the profile tells (0: it does not).
    """

    times: ModuleTimes
    forward: Nodes
    backward: Nodes
    owners: Mapping[Role, Role]
    estimate_us: Estimate
    slowness: float = 0.0

    def price_slot(self, slot: Slot) -> dict[_Key, float]:
        """Return the times of the operators that share a module's time, forward and backward.

        Communication that is known apart is taken off, and stays the predictor's. Else it is in the
        time. A backward pass that was not measured computes twice as long as the forward one; if
        the module communicates in both, it does so as long in both, else what the backward pass
        communicates is the predictor's: no sum is counted twice, and none is lost.
        """
        spent = self._spent(slot)
        holds_sums = self.times.has_communication and spent.communication_us == 0
        forward_us = spent.forward_us - spent.communication_us
        backward_us = spent.backward_us - spent.communication_us
        own = [node for node in self._own(slot) if holds_sums or not is_collective(node)]
        roles = {(node.section, node.role) for node in own}
        reverse = [node for node in self.backward if self._belongs_to(node, roles, holds_sums)]
        sent_us = self._sent_us(own, forward_us)
        computed_us = forward_us - sent_us
        found = self._share_out(computed_us, sent_us, own)
        if math.isnan(backward_us):
            has_both = sent_us > 0 and any(is_collective(node) for node in reverse)
            reverse = [node for node in reverse if has_both or not is_collective(node)]
            returned_us = sent_us if has_both else 0.0
            return found | self._share_out(_BACKWARD_RATIO * computed_us, returned_us, reverse)
        backward_us = max(0.0, backward_us)
        returned_us = self._sent_us(reverse, backward_us)
        return found | self._share_out(backward_us - returned_us, returned_us, reverse)

    def find_slowness(self, slots: Sequence[Slot]) -> float:
        """Return how much longer than estimated layers compute, where they do nothing else (0)."""
        alone = [
            slot
            for slot in slots
            if all(
                node.section is Section.LAYER and not is_collective(node)
                for node in self._own(slot)
            )
        ]
        estimated_us = sum(self._sum(self._own(slot)) for slot in alone)
        measured_us = sum(self._spent(slot).forward_us for slot in alone)
        return measured_us / estimated_us if estimated_us else 0.0

    def _own(self, slot: Slot) -> list[OperatorNode]:
        return [node for node in self.forward if (node.section, node.role) in slot.roles]

    def _spent(self, slot: Slot) -> PassTimes:
        """Return the time of a module in all layers it is in."""
        layers = {layer for node in self._own(slot) for layer in _layers_of(node)}
        return add_times([slot.module.time_in(layer) for layer in sorted(layers)])

    def _sent_us(self, nodes: Sequence[OperatorNode], time_us: float) -> float:
        """Return what of a time is communication."""
        sums = [node for node in nodes if is_collective(node)]
        if not sums:
            return 0.0
        whole_us = self._sum(nodes)
        estimated_us = whole_us - self._sum(sums)
        if self.slowness:
            return max(0.0, time_us - self.slowness * estimated_us)
        return time_us * (1 - estimated_us / whole_us) if whole_us else 0.0

    def _belongs_to(self, node: OperatorNode, roles: set[Role], holds_sums: bool) -> bool:
        is_inside = self.owners.get((node.section, node.role)) in roles and is_measurable(node)
        return is_inside and (holds_sums or not is_collective(node))

    def _share_out(
        self, computed_us: float, sent_us: float, nodes: Sequence[OperatorNode]
    ) -> dict[_Key, float]:
        """Share times in proportion to estimates; evenly where nothing is estimated."""
        sums = [node for node in nodes if is_collective(node)]
        others = [node for node in nodes if not is_collective(node)]
        found: dict[_Key, float] = {}
        for time_us, own in ((computed_us, others), (sent_us, sums)):
            whole_us, num_calls = self._sum(own), sum(node.repeat for node in own)
            found |= {
                _key(node): time_us
                * (self.estimate_us(node) / whole_us if whole_us else 1 / num_calls)
                for node in own
            }
        return found

    def _sum(self, nodes: Sequence[OperatorNode]) -> float:
        return sum(self.estimate_us(node) * node.repeat for node in nodes)


def _facts(times: ModuleTimes, scenario: TrainingScenario) -> Iterator[tuple[str, object, object]]:
    """Yield what both say of the run: its name, the profile's value, the scenario's."""
    yield "model", _preset_name(times.model), _preset_name(scenario.model.name)
    yield "device", times.device, scenario.device
    yield "sequence_length", times.sequence_length, scenario.sequence_length
    if times.dtype is not None:
        yield "dtype", times.dtype.name.lower(), scenario.dtype.name.lower()


def _preset_name(name: str) -> str:
    try:
        return find_model(name).name
    except UnknownModelError:
        return name


def _describe(times: ModuleTimes, scenario: TrainingScenario) -> Iterator[str]:
    name = f"module times {times.source}"
    if not times.sequence_length:
        yield (
            f"{name}: the source does not say how long sequences were; taken as"
            f" {scenario.sequence_length} tokens"
        )
    if times.dtype is None:
        taken = scenario.dtype.name.lower()
        yield f"{name}: the source does not say the number format; taken as {taken}"
    sizes = sorted({time.micro_batch_size for time in times.times})
    if not sizes[0] <= scenario.micro_batch_size <= sizes[-1]:
        yield (
            f"{name}: profiled with micro batches of {sizes[0]} to {sizes[-1]}; at"
            f" {scenario.micro_batch_size} the time of a sample is that of the nearest"
        )


def _key(node: OperatorNode) -> _Key:
    return node.section, node.role, node.phase


def _is_layer_computation(node: OperatorNode) -> bool:
    return node.section is Section.LAYER and not is_collective(node)


def _layers_of(node: OperatorNode) -> Sequence[int]:
    return node.layers if node.section is Section.LAYER else range(-1, 0)
