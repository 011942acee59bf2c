"""Cut the layers of a model to the stages of a strategy: by time, with room for what they hold.

With several chunks per stage the pipeline goes round all stages more than once. Every round is cut
alike, so a round is the chain: its nodes are the layers at one place of every round together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.memory import TRAINING_AXES, training_headroom_bytes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.placement.chain import Chain
from foretoken.simulator.search.placement.cluster import NodeKind
from foretoken.simulator.search.placement.layer_kind import NUM_KINDS
from foretoken.simulator.search.placement.placed_work import BETWEEN, FIRST, LAST, CutCosts
from foretoken.simulator.search.placement.stage_memory import MemoryLines
from foretoken.simulator.search.placement.strategy import PlacedStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSite:
    """What decides how layers are cut, besides the method.

    `layer_kinds` has the kind of every layer, `memory_ratio` is the memory of devices over what
    they have; the `scenario` says what a trainer leaves free.
    """

    scenario: TrainingScenario
    kinds: Sequence[NodeKind]
    costs: CutCosts
    memory: MemoryLines
    layer_kinds: Ints
    memory_ratio: float = 1.0


def make_chain(strategy: PlacedStrategy, site: StageSite, *, has_memory: bool) -> Chain:
    """Return a round of layers as a chain, times in µs of one micro batch in all rounds.

    The embedding goes with the first layer, the head with the last. What a stage has besides its
    layers, and what it sends, counts as the cost of the cut after it.
    """
    stages, rounds = strategy.pipeline.stages, strategy.virtual_stages
    constants, sent = site.costs.constants, site.costs.sent
    counts = count_in_rounds(site.layer_kinds, rounds)
    costs = counts @ site.costs.per_layer.T
    constant = np.maximum(0.0, constants[:, BETWEEN])
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
