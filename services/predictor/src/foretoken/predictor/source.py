"""Whose measurements answer a question: the device's own, or those of another of the same chip."""

from dataclasses import dataclass, replace

from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.operator import OperatorSpec
from foretoken.predictor.model_set import Choice, ModelSet, Wanted
from foretoken.predictor.roofline import Target
from foretoken.predictor.transfer.siblings import find_siblings


@dataclass(frozen=True, slots=True)
class Source:
    """The model that answers, and what its rows were measured on."""

    choice: Choice
    target: Target


def find_source(
    models: ModelSet, spec: OperatorSpec, target: Target, wanted: Wanted
) -> Source | None:
    """Return the source on the device, else on one of the same chip, else None.

    Links are not those of the chip, so a collective has no source elsewhere.
    """
    choice = models.choose(spec, target, wanted)
    if choice is not None:
        return Source(choice, target)
    for sibling in () if spec.is_collective else find_siblings(target.device):
        elsewhere = replace(target, device=sibling)
        choice = models.choose(spec, elsewhere, wanted)
        if choice is not None:
            return Source(choice, elsewhere)
    return None


def target_inside_node(target: Target) -> Target:
    """Return what a collective inside a node runs on: the topology that its nodes are those of."""
    topology = target.topology
    if topology is None or not topology.nodes_like:
        return target
    return replace(target, topology=find_topology(topology.nodes_like))
