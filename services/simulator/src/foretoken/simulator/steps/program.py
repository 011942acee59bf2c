"""Cut the operators of a pass to short programs: what computes, and the collectives between.

A layer that computes only between two collectives has one piece for all of that. Layers that are
alike share a program.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.lowering.graph import OperatorNode, Overlap, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import find_operator

# One entry per way the step is timed; see `variability`.
Column = NDArray[np.float64]
# What exposed communication is counted under: group of the breakdown and axis of the layout.
CommunicationKey = tuple[str, str]
# Products of modules of their own, but for the router's, which is plain PyTorch.
_PRODUCTS, _ROUTER = ("gemm", "grouped_gemm"), "moe_router"
# The product of experts that ends in gradients of their weights.
_EXPERT_GRADIENT = "grouped_gemm_wgrad"
# The exchange that needs the counts of tokens on the host.
_COUNTED = "moe_dispatch_all_to_all"
# Kernels that an operator launches on average where `launch_us` was measured: 103 of 56 operators.
# Source: tests/benchmarks/host_time_of_layer.py.
_KERNELS_PER_OPERATOR = 103 / 56
# Tells the time of one repetition of an operator.
Duration = Callable[[OperatorNode], Column]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassNodes:
    """Operators of one pass over `layers`, both in the order they are run.

    What is not of a layer is run before all layers where it stands before them, else after all.
    """

    nodes: Nodes
    layers: Sequence[int]


def count_expert_calls(node: OperatorNode) -> int:
    """Return the calls of an operator that runs expert by expert.

    Products of 8 bit have a conversion of their input, or of their output's gradient, each.
    """
    num_experts = int(node.dims.get("num_groups", 0))
    is_converted = node.dtype is DType.FP8 and node.operator == "grouped_gemm"
    return num_experts * (2 if is_converted else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRules:
    """What a framework does to a pass: its host's times in µs, and the slowdown.

    The host leaves `gap_us` in each layer, and needs `launch_us` for each operator, of chains in
    proportion to their kernels, `module_call_us` more for a pass of a product's module, of experts
    `expert_call_us` more for each call, and `expert_hook_us` for each gradient of an expert's
    weight: where a layer's kernels are shorter than that, it is as long as they take to launch.
    With `waits_for_counts` it launches the exchange of tokens, and what follows, once the device
    has done all before.
    """

    gap_us: Column
    slowdown_ratio: float = 1.0
    launch_us: Column | float = 0.0
    module_call_us: Column | float = 0.0
    expert_call_us: Column | float = 0.0
    expert_hook_us: Column | float = 0.0
    waits_for_counts: bool = False
    # Tells how many calls an operator has, of one rank, or of each of the cases.
    count_calls: Callable[[OperatorNode], Column | int] = count_expert_calls

    @property
    def is_free(self) -> bool:
        """Whether the host needs no time to launch anything."""
        return not any(map(np.any, (self.launch_us, self.module_call_us, self.expert_call_us)))

    def submission_us(self, node: OperatorNode) -> Column | float:
        """Return what the host needs to launch an operator, outside of layers all repetitions."""
        num_launches = 1 if node.section is Section.LAYER else node.repeat
        calls_us: Column | float = _starts_module(node) * self.module_call_us
        if np.any(self.expert_call_us):
            hook_us = self.expert_hook_us * (node.operator == _EXPERT_GRADIENT)
            calls_us = calls_us + self.count_calls(node) * (self.expert_call_us + hook_us)
        return num_launches * (_count_operators(node) * self.launch_us + calls_us)

    @property
    def outside_of_layers(self) -> "StreamRules":
        """The same rules without a layer's gap."""
        return replace(self, gap_us=0 * self.gap_us)


@dataclass(frozen=True, slots=True)
class Compute:
    """Computation, with communication that may overlap it and is waited for at its end."""

    time_us: Column
    concurrent: tuple[tuple[CommunicationKey, Column], ...] = ()


@dataclass(frozen=True, slots=True)
class Communicate:
    """One collective; `slot` finds a prefetched one in the layer after."""

    overlap: Overlap
    key: CommunicationKey
    time_us: Column
    slot: Hashable = None


Program = tuple[Compute | Communicate, ...]


def _count_operators(node: OperatorNode) -> float:
    """Return how many operators launch as many kernels."""
    num_kernels = node.num_kernels[node.phase is Phase.BACKWARD]
    return max(1.0, num_kernels / _KERNELS_PER_OPERATOR)


def _starts_module(node: OperatorNode) -> bool:
    """Tell whether a pass of a product's module begins: one has both gradients."""
    is_router = node.role.startswith(_ROUTER)
    return node.operator in _PRODUCTS and not node.role.endswith("_wgrad") and not is_router


def split_layers(nodes: Nodes) -> tuple[Nodes, Nodes]:
    """Return what comes before the layers, and what comes after."""
    first = next(
        (i for i, node in enumerate(nodes) if node.section is Section.LAYER and node.repeat),
        len(nodes),
    )
    tail = tuple(node for node in nodes[first:] if node.section is not Section.LAYER)
    return nodes[:first], tail


def covered_layers(node: OperatorNode) -> range | frozenset[int]:
    """Return the layers that run an operator, quick to look a layer up in."""
    layers = node.layers
    return layers if isinstance(layers, range) else frozenset(layers)


def alike_layers(work: PassNodes) -> list[tuple[Nodes, int]]:
    """Return the operators of each run of layers that are alike, and how many they are."""
    everything = [node for node in work.nodes if node.section is Section.LAYER and node.repeat]
    covers = [covered_layers(node) for node in everything]
    members = (tuple(i for i, cover in enumerate(covers) if at in cover) for at in work.layers)
    return [
        (tuple(everything[i] for i in indices), sum(1 for _ in group))
        for indices, group in groupby(members)
    ]


def cut_program(nodes: Nodes, duration: Duration, rules: StreamRules) -> Program:
    """Return the program of one layer, or of what is outside of layers with all its repetitions."""
    computed = {node.role for node in nodes if not _is_collective(node)}
    concurrent: dict[str, list[tuple[CommunicationKey, Column]]] = {}
    for node in nodes:
        if _is_concurrent(node, computed):
            concurrent.setdefault(node.overlaps_with, []).append(
                (_key(node), _time(node, duration))
            )
    program: list[Compute | Communicate] = []
    pending = none = 0 * rules.gap_us
    for index, node in enumerate(nodes):
        if _is_concurrent(node, computed):
            continue
        if not _is_collective(node) and node.role not in concurrent:
            pending = pending + _time(node, duration)
            continue
        if pending is not none:
            program.append(Compute(pending))
            pending = none
        if _is_collective(node):
            program.append(_communicate(node, index, duration))
        else:
            program.append(Compute(_time(node, duration), tuple(concurrent.pop(node.role))))
    if rules.is_free:
        host_us: Column | float = 0.0
    elif rules.waits_for_counts and any(node.role == _COUNTED for node in nodes):
        host_us = _host_time_behind(nodes, computed, duration, rules)
    else:
        host_us = _host_time(nodes, [*program, Compute(pending)], rules)
    program.append(Compute(pending + np.maximum(rules.gap_us, host_us)))
    return tuple(program)


def _host_time(
    nodes: Nodes, program: Sequence[Compute | Communicate], rules: StreamRules
) -> Column | float:
    """Return by how much the launches of a layer take longer than what they launch."""
    uncovered_us: Column | float = sum(map(rules.submission_us, nodes))
    for step in program:
        if isinstance(step, Compute) or step.overlap is Overlap.EXPOSED:
            uncovered_us = uncovered_us - step.time_us
    return uncovered_us


def _host_time_behind(
    nodes: Nodes, computed: set[str], duration: Duration, rules: StreamRules
) -> Column | float:
    """Return how much longer a layer takes than its operators whose host has waited for counts.

    From there on host and device start together, and the device has an operator when that, and
    all since, are launched.
    """
    first = next(at for at, node in enumerate(nodes) if node.role == _COUNTED)
    behind_us: Column | float = 0.0
    most_us = behind_us
    for node in (*nodes[first:], *nodes[:first]):
        behind_us = behind_us + rules.submission_us(node)
        most_us = np.maximum(most_us, behind_us)
        is_waited = node.overlap in (Overlap.EXPOSED, Overlap.CONCURRENT)
        if not _is_collective(node) or (is_waited and not _is_concurrent(node, computed)):
            behind_us = behind_us - _time(node, duration)
    return most_us


def _communicate(node: OperatorNode, index: int, duration: Duration) -> Communicate:
    overlap = Overlap.EXPOSED if node.overlap is Overlap.CONCURRENT else node.overlap
    return Communicate(overlap, _key(node), _time(node, duration), (node.role, index))


def _is_collective(node: OperatorNode) -> bool:
    return find_operator(node.operator).is_collective


def _is_concurrent(node: OperatorNode, computed: set[str]) -> bool:
    return node.overlap is Overlap.CONCURRENT and node.overlaps_with in computed


def _key(node: OperatorNode) -> CommunicationKey:
    return node.group, node.axis


def _time(node: OperatorNode, duration: Duration) -> Column:
    # A layer runs each of its operators once; outside of layers all repetitions follow each other.
    count = 1 if node.section is Section.LAYER else node.repeat
    return duration(node) * count
