"""Cut the layers of a model to the stages of a strategy: by time, with room for what they hold.

With several chunks per stage the pipeline goes round all stages more than once. Every round is cut
alike, so a round is the chain: its nodes are the layers at one place of every round together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.memory_headroom import TRAINING_AXES, training_headroom_bytes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.placement.chain import Chain
from foretoken.simulator.search.placement.cluster import NodeKind, Pipeline
from foretoken.simulator.search.placement.layer_kind import NUM_KINDS
from foretoken.simulator.search.placement.stage_cost import (
    BETWEEN,
    FIRST,
    LAST,
    MEASURES,
    ONLY,
    StageLines,
)
from foretoken.simulator.search.placement.stage_memory import MemoryLines
from foretoken.simulator.search.placement.strategy import PlacedStrategy

_PASSES = [MEASURES.index(name) for name in ("forward", "backward_input", "backward_weight")]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSite:
    """What decides how layers are cut, besides the method.

    `layer_kinds` has the kind of every layer, `memory_ratio` is the memory of devices over what
    they have; the `scenario` says what a trainer leaves free.
    """

    scenario: TrainingScenario
    kinds: Sequence[NodeKind]
    lines: Sequence[StageLines | None]
    memory: MemoryLines
    layer_kinds: Ints
    memory_ratio: float = 1.0


def make_chain(strategy: PlacedStrategy, site: StageSite, *, has_memory: bool) -> Chain:
    """Return a round of layers as a chain, times in µs of one micro batch in all rounds.

    The embedding goes with the first layer, the head with the last. What a stage has besides its
    layers, and what it sends, counts as the cost of the cut after it.
    """
    stages, rounds = strategy.pipeline.stages, strategy.virtual_stages
    constants, per_layer = pass_times(site.lines)
    counts = count_in_rounds(site.layer_kinds, rounds)
    costs = counts @ per_layer.T
    constant = np.maximum(0.0, constants[:, BETWEEN])
    sent = transfer_times(strategy.pipeline, site.kinds, site.lines)[:, :, 0].sum(axis=0)
    costs[0] += np.maximum(0.0, constants[:, FIRST] - constants[:, BETWEEN])
    costs[-1] += np.maximum(0.0, constants[:, LAST]) + (rounds - 1) * (constant + sent[-1])
    between = rounds * (sent + constant[list(stages)])[:-1]
    given = {}
    if has_memory:
        given = {
            "bytes_needed": counts @ site.memory.per_layer.T,
            "bytes_there": np.maximum(0.0, find_room(strategy, site) - site.memory.constants),
        }
    return Chain.of(costs, stages, transfers=between[None, :] if len(stages) > 1 else (), **given)


def find_room(strategy: PlacedStrategy, site: StageSite) -> Floats:
    """Return the bytes that the allocators of every stage can have: (stages)."""
    trainer, work = site.scenario.trainer.resolve(), strategy.work
    layout = replace(site.scenario.layout, tp=work.tp, cp=work.cp, dp=work.dp)
    layout = replace(layout, pp=len(strategy.pipeline.stages))
    degrees = [layout.degree(axis) for axis in TRAINING_AXES]
    devices = [find_device(site.kinds[kind].device) for kind in strategy.pipeline.stages]
    return np.array(
        [
            device.memory_bytes * site.memory_ratio
            - training_headroom_bytes(device, trainer, degrees)
            for device in devices
        ],
        dtype=np.float64,
    )


def count_in_rounds(layer_kinds: Ints, rounds: int) -> Ints:
    """Return the layers of each kind at every place of a round, all rounds together: (place, kind).

    There are as many layers in each.
    """
    kinds = np.arange(NUM_KINDS)
    found: Ints = (layer_kinds.reshape(rounds, -1, 1) == kinds).sum(axis=0)
    return found


def count_by_chunk(layer_kinds: Ints, chunk_layers: Sequence[int]) -> Ints:
    """Return the layers of each kind in every chunk: (chunk, kind)."""
    ends = np.cumsum(chunk_layers)
    of_kind = layer_kinds[:, None] == np.arange(NUM_KINDS)
    before = np.concatenate([np.zeros((1, NUM_KINDS), np.int64), np.cumsum(of_kind, axis=0)])
    found: Ints = before[ends] - before[ends - np.asarray(chunk_layers)]
    return found


def pass_times(lines: Sequence[StageLines | None]) -> tuple[Floats, Floats]:
    """Return a micro batch's passes at the estimate: (kind, position) and (kind, kind of layer)."""
    constants, per_layer = np.zeros((len(lines), ONLY)), np.zeros((len(lines), NUM_KINDS))
    for kind, line in enumerate(lines):
        if line is not None:
            constants[kind] = line.constants[:ONLY, _PASSES, 0].sum(axis=1)
            per_layer[kind] = line.per_layer[BETWEEN][:, _PASSES, 0].sum(axis=1)
    return constants, per_layer


def transfer_times(
    pipeline: Pipeline, kinds: Sequence[NodeKind], lines: Sequence[StageLines | None]
) -> Floats:
    """Return what stages send to the next, and the last to the first.

    (forward and back, stages, cases). Between kinds of nodes the slower end sets the pace.
    """
    found, num_stages = [], len(pipeline.stages)
    for stage, near in enumerate(_are_near(pipeline, tuple(k.devices_per_node for k in kinds))):
        own = [lines[pipeline.stages[at % num_stages]] for at in (stage, stage + 1)]
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
    return np.array(found).transpose(1, 0, 2)


@lru_cache(maxsize=4096)
def _are_near(pipeline: Pipeline, devices_per_node: tuple[int, ...]) -> tuple[bool, ...]:
    """Return whether all devices of a stage are on the nodes of their peers of the next.

    After the last stage comes the first.
    """
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
    is_one_kind = len(pipeline.runs) == 1
    found[-1] = is_one_kind and pipeline.num_devices <= devices_per_node[pipeline.stages[0]]
    return tuple(found)
