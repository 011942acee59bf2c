"""Whose measurements answer a question: the device's own, or those of one that is much like it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.model_set import Choice, ModelSet, Wanted
from foretoken.predictor.roofline import Target
from foretoken.predictor.transfer.siblings import find_linked_alike, find_siblings


@dataclass(frozen=True, slots=True)
class Source:
    """The models that may answer, the nearest to what was asked first, and where they measured."""

    choices: Sequence[Choice]
    target: Target

    @property
    def choice(self) -> Choice:
        """The model nearest to what was asked."""
        return self.choices[0]


def find_source(
    models: ModelSet, spec: OperatorSpec, target: Target, wanted: Wanted
) -> Source | None:
    """Return the source on the device, else on one of the same chip, else None.

    Links are not those of the chip, so a collective has no source elsewhere; inside a node
    `target_linked_alike` may know one.
    """
    choices = models.rank(spec, target, wanted)
    if choices:
        return Source(choices, target)
    for sibling in () if spec.is_collective else find_siblings(target.device, target.dtype):
        elsewhere = replace(target, device=sibling)
        choices = models.rank(spec, elsewhere, wanted)
        if choices:
            return Source(choices, elsewhere)
    return None


def target_inside_node(target: Target) -> Target:
    """Return what a collective inside a node runs on: the topology that its nodes are those of."""
    topology = target.topology
    if topology is None or not topology.nodes_like:
        return target
    return replace(target, topology=find_topology(topology.nodes_like))


def target_linked_alike(
    models: ModelSet, spec: OperatorSpec, target: Target, wanted: Wanted
) -> Target | None:
    """Return where a collective inside a node was measured on nodes that are linked alike.

    None where the target's own nodes were measured, or none like them were.
    """
    if target.topology is None or models.choose(spec, target, wanted) is not None:
        return None
    for topology in find_linked_alike(target.topology):
        alike = replace(target, device=find_device(topology.device), topology=topology)
        if models.choose(spec, alike, wanted) is not None:
            return alike
    return None
