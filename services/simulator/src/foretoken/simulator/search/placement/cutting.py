"""Cut the layers of a model to the stages of a strategy: by time, with room for what they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.simulator.search.placement.chain import Chain
from foretoken.simulator.search.placement.cluster import NodeKind, Pipeline
from foretoken.simulator.search.placement.stage_cost import MEASURES, Numbers, StageLines
from foretoken.simulator.search.placement.stage_memory import MemoryLines
from foretoken.simulator.search.placement.strategy import PlacedStrategy

FIRST, BETWEEN, LAST, ONLY = range(4)
_PASSES = [MEASURES.index(name) for name in ("forward", "backward_input", "backward_weight")]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSite:
    """What decides how layers are cut, beside the method."""

    kinds: Sequence[NodeKind]
    lines: Sequence[StageLines | None]
    memory: MemoryLines
    num_layers: int


def make_chain(strategy: PlacedStrategy, site: StageSite) -> Chain:
    """Return the layers of a model as a chain, times in µs of one micro batch.

    The embedding goes with the first layer, the head with the last. What a stage has beside its
    layers, and what it sends, counts as the cost of the cut after it.
    """
    stages = strategy.pipeline.stages
    constants, per_layer = pass_times(site.lines)
    costs = np.repeat(per_layer[None, :], site.num_layers, axis=0)
    beside = constants[:, BETWEEN]
    costs[0] += np.maximum(0.0, constants[:, FIRST] - beside)
    costs[-1] += np.maximum(0.0, constants[:, LAST] - beside)
    memory = site.memory
    there = np.array([find_device(site.kinds[kind].device).memory_bytes for kind in stages])
    needed = np.repeat(memory.per_layer[None, :], site.num_layers, axis=0)
    sent = transfer_times(strategy.pipeline, site.kinds, site.lines)[:, :, 0].sum(axis=0)
    sent = sent[:-1] + np.maximum(0.0, beside[list(stages)][:-1])
    return Chain.of(
        costs,
        stages,
        transfers=sent[None, :] if len(stages) > 1 else (),
        bytes_needed=needed,
        bytes_there=np.maximum(0.0, there - memory.constants),
    )


def pass_times(lines: Sequence[StageLines | None]) -> tuple[Numbers, Numbers]:
    """Return a micro batch's passes at the estimate by kind: (kind, position) and (kind)."""
    constants, per_layer = np.zeros((len(lines), ONLY)), np.zeros(len(lines))
    for kind, line in enumerate(lines):
        if line is not None:
            constants[kind] = line.constants[:ONLY, _PASSES, 0].sum(axis=1)
            per_layer[kind] = line.per_layer[BETWEEN, _PASSES, 0].sum()
    return constants, per_layer


def transfer_times(
    pipeline: Pipeline, kinds: Sequence[NodeKind], lines: Sequence[StageLines | None]
) -> Numbers:
    """Return what stages send to the next: (forward and back, stages, bounds); the last nothing.

    Between kinds of nodes the slower end sets the pace.
    """
    found = []
    for stage, near in enumerate(_are_near(pipeline, tuple(k.devices_per_node for k in kinds))):
        own = [lines[pipeline.stages[at]] for at in (stage, stage + 1)]
        sides = [line for line in own if line is not None]
        if near:
            found.append((sides[0].near_us, sides[0].near_back_us))
        else:
            found.append(
                (
                    np.max([line.across_us for line in sides], axis=0),
                    np.max([line.across_back_us for line in sides], axis=0),
                )
            )
    none = np.zeros(3)
    return np.array([*found, (none, none)]).transpose(1, 0, 2)


@lru_cache(maxsize=4096)
def _are_near(pipeline: Pipeline, devices_per_node: tuple[int, ...]) -> tuple[bool, ...]:
    """Return whether all devices of a stage are on the nodes of their peers of the next."""
    found: list[bool] = []
    for kind, count in pipeline.runs:
        size, room = pipeline.stage_size, devices_per_node[kind]
        for stage in range(count):
            first = stage * size
            is_inside = all(
                (first + offset) // room == (first + size + offset) // room
                for offset in range(size)
            )
            found.append(is_inside and stage + 1 < count)
    return tuple(found[:-1])
