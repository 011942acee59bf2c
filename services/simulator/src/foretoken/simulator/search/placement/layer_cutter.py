"""Cut the layers of strategies to their stages, and measure what the stages then hold."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from foretoken.simulator.search.placement.chain import Chain, Cut, find_method
from foretoken.simulator.search.placement.cutting import (
    StageSite,
    find_room,
    make_chain,
)
from foretoken.simulator.search.placement.layer_kind import list_layer_kinds
from foretoken.simulator.search.placement.placed_work import CutCosts
from foretoken.simulator.search.placement.stage_memory import StageMemories
from foretoken.simulator.search.placement.strategy import PlacedStrategy, PlacementSpace


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
