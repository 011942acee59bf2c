"""Cut layers of strategies to their stages, by time and with room for what the stages then hold.

With several chunks per stage the pipeline goes round all stages more than once. Every round is cut
alike, so a round is the chain: its nodes are the layers at one place of every round together.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.memory import TRAINING_AXES, training_headroom_bytes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.placement.chain import Chain, Cut, find_method
from foretoken.simulator.search.placement.cluster import NodeKind
from foretoken.simulator.search.placement.layer_kind import NUM_KINDS, list_layer_kinds
from foretoken.simulator.search.placement.placed_work import BETWEEN, FIRST, LAST, CutCosts
from foretoken.simulator.search.placement.stage_memory import MemoryLines, StageMemories
from foretoken.simulator.search.placement.strategy import PlacedStrategy, PlacementSpace


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCut:
    """The layers of every chunk of a strategy in the order of the model; none where none fits.

    Of the fullest device `reserved_bytes` are taken and `margin_bytes` left; `reason` says why
    nothing fits.
    """

    layers: tuple[int, ...] = ()
    reserved_bytes: float = 0.0
    margin_bytes: float = -1.0
    reason: str = ""


class LayerCutter:
    """Cuts by the method of a space; equal chains are cut once."""

    def __init__(
        self,
        space: PlacementSpace,
        memories: StageMemories,
        memory_ratio: float,
    ) -> None:
        """Take what stages hold, and the memory of devices over what they have."""
        self._space, self._memory_ratio = space, memory_ratio
        self._layer_kinds = list_layer_kinds(space.scenario.model)
        self._memories = memories
        self._method = find_method(space.space.partition)
        self._stopped: dict[str, int] = defaultdict(int)
        self._cuts: dict[tuple[object, ...], Cut] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the cuts."""
        return tuple(f"{note} ({count} strategies)" for note, count in self._stopped.items())

    def cut(self, point: PlacedStrategy, costs: CutCosts) -> LayerCut:
        """Return the cut of a strategy that can run, whose layers cost this.

        Raises:
            InvalidRequestError: the method does not take a problem of this size.

        """
        kinds = self._space.kinds
        site = StageSite(
            scenario=self._space.scenario,
            kinds=kinds,
            costs=costs,
            memory=self._memories.lines(point, kinds[point.pipeline.stages[0]]),
            layer_kinds=self._layer_kinds,
            memory_ratio=self._memory_ratio,
        )
        # The best of all cuts is the best of those that fit if it does.
        for has_memory in (False, True):
            found = self._cut_chain(make_chain(point, site, has_memory=has_memory))
            if not found.num_nodes:
                break
            held = self._measure(point, found, site)
            if held.margin_bytes >= 0:
                if found.note:
                    self._stopped[found.note] += 1
                return held
        return LayerCut(reason=self._explain(point, site))

    def _cut_chain(self, chain: Chain) -> Cut:
        arrays = (chain.costs, chain.transfers, chain.bytes_needed, chain.bytes_there)
        key = (chain.kinds, *(array.tobytes() for array in arrays))
        if key not in self._cuts:
            self._cuts[key] = self._method.cut(chain)
        return self._cuts[key]

    def _measure(self, point: PlacedStrategy, cut: Cut, site: StageSite) -> LayerCut:
        layers = cut.num_nodes * point.virtual_stages
        kind = self._space.kinds[point.pipeline.stages[0]]
        reserved = self._memories.measure(point, kind, layers)
        margins = find_room(point, site) - reserved
        fullest = int(margins.argmin())
        return LayerCut(
            layers=layers,
            reserved_bytes=float(reserved[fullest]),
            margin_bytes=float(margins[fullest]),
        )

    def _explain(self, point: PlacedStrategy, site: StageSite) -> str:
        room = np.maximum(0.0, find_room(point, site) - site.memory.constants)
        # Of the kind of layer that most are of.
        per_layer = point.virtual_stages * np.maximum(site.memory.per_layer[:, -1], 1.0)
        most = int(np.floor(room / per_layer).sum()) * point.virtual_stages
        needed = len(self._layer_kinds)
        if most < needed:
            return f"the stages have memory for {most} of {needed} layers"
        return f"{self._method.name} finds no cut that every stage has the memory for"
