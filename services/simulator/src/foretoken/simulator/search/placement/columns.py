"""Strategies of a mixed cluster as columns, like those of equal devices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import WEIGHT_PARALLELS
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.placement.strategy import (
    PlacedStrategy,
    PlacementSpace,
    describe_nodes,
    describe_stages,
    name_strategy,
)
from foretoken.simulator.steps.strategies import (
    AXES,
    RECOMPUTE_MODES,
    Strategies,
    StrategySource,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedSource(StrategySource):
    """What all strategies of a mixed cluster have.

    `devices` name its subsets by their nodes; `points` are all strategies of the space.
    """

    space: PlacementSpace
    points: Sequence[PlacedStrategy]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacedStrategies(Strategies):
    """One entry per strategy in each column.

    `device` is the subset of the cluster, by the names of `source`; `point` the strategy before its
    layers were cut, by its place among the source's points; `pipeline` the place of its pipeline
    among those of the space. `chunk_layers` has the layers of every chunk as a tuple, empty where
    nothing was cut.
    """

    point: Ints
    pipeline: Ints
    chunk_layers: np.ndarray

    @property
    def axes(self) -> tuple[str, ...]:
        """The columns."""
        return _PLACED_AXES

    @property
    def space(self) -> PlacementSpace:
        """The space that all are of."""
        return self._placed.space

    @property
    def points(self) -> list[PlacedStrategy]:
        """The strategies one by one, before their layers were cut."""
        return [self._placed.points[number] for number in self.point.tolist()]

    @property
    def _placed(self) -> PlacedSource:
        if not isinstance(self.source, PlacedSource):
            raise TypeError("strategies of a mixed cluster have its source")
        return self.source

    def scenario(self, row: int) -> TrainingScenario:
        """Return the scenario of one strategy for the simulator."""
        point = self._placed.points[int(self.point[row])]
        return self.space.scenario_of(point, self.chunk_layers[row])

    def overlaps(self) -> list[str]:
        """Return nothing: the framework hides what the scenario's trainer hides."""
        return [""] * len(self)

    def placements(self) -> list[str]:
        """Return the devices of the stages."""
        return [describe_stages(point.pipeline, self.space.kinds) for point in self.points]

    def stage_cuts(self) -> list[str]:
        """Return the layers of every chunk."""
        return [",".join(map(str, layers)) for layers in self.chunk_layers]

    def names(self, rows: np.ndarray) -> list[str]:
        """Return the names of some strategies."""
        return [name_strategy(point, self.space) for point in self.take(rows).points]


_PLACED_AXES = (*AXES, "point", "pipeline", "chunk_layers")


def list_columns(space: PlacementSpace, points: Sequence[PlacedStrategy]) -> PlacedStrategies:
    """Return strategies as columns, nothing cut."""
    scenario = space.scenario
    pipelines = {id(pipeline): number for number, pipeline in enumerate(space.pipelines)}
    clusters = {
        nodes: number
        for number, nodes in enumerate(dict.fromkeys(item.nodes for item in space.pipelines))
    }
    names = {item.nodes: describe_nodes(item, space.kinds) for item in space.pipelines}
    schedules = space.schedules
    rows = [
        (
            *(clusters[point.pipeline.nodes], point.pipeline.num_devices, point.global_batch_size),
            *(point.work.tp, len(point.pipeline.stages), point.virtual_stages, point.work.cp),
            *(scenario.layout.ep, point.work.micro_batch_size, int(point.work.sequence_parallel)),
            *(point.work.zero_stage, scenario.shard_degree, 0),
            RECOMPUTE_MODES.index(point.work.recompute),
            *(WEIGHT_PARALLELS.index(scenario.weight_parallel), scenario.weight_degree),
            schedules.index(point.schedule),
            *(number, pipelines[id(point.pipeline)]),
        )
        for number, point in enumerate(points)
    ]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(_PLACED_AXES) - 1)
    return PlacedStrategies(
        source=PlacedSource(
            scenario=scenario,
            devices=tuple(names[nodes] for nodes in clusters),
            pipeline_schedules=schedules,
            space=space,
            points=tuple(points),
        ),
        chunk_layers=as_column([()] * len(rows)),
        **dict(zip(_PLACED_AXES[:-1], table.T, strict=True)),
    )


def as_column(cuts: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return tuples as a column."""
    column = np.empty(len(cuts), dtype=object)
    for row, cut in enumerate(cuts):
        column[row] = cut
    return column


def list_cluster_prices(space: PlacementSpace) -> Floats:
    """Return what an hour of a device costs on average in every subset; 0 without a price."""
    per_device = {
        pipeline.nodes: space.usd_per_hour(pipeline) / pipeline.num_devices
        for pipeline in space.pipelines
    }
    return np.array(list(per_device.values()), dtype=np.float64)
