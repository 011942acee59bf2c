"""Time strategies whose layers are cut: as many at once as have equal pipelines."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from foretoken.simulator.search.placement.cutting import count_by_chunk, transfer_times
from foretoken.simulator.search.placement.layer_kind import list_layer_kinds
from foretoken.simulator.search.placement.stage_prices import StagePrices
from foretoken.simulator.search.placement.step_time import PlacedStages, StepFigures, time_steps
from foretoken.simulator.search.placement.strategy import PlacedStrategy, PlacementSpace


def time_placed(
    points: Sequence[PlacedStrategy],
    cuts: Sequence[tuple[int, ...]],
    space: PlacementSpace,
    prices: StagePrices,
) -> StepFigures:
    """Return the steps of strategies with the layers of each of their chunks, at these prices."""
    found = StepFigures(
        step_us=np.zeros((len(points), prices.num_cases)),
        bubble_ratio=np.zeros(len(points)),
        exposed_ratio=np.zeros(len(points)),
    )
    layer_kinds = list_layer_kinds(space.scenario.model)
    alike: dict[tuple[int, int, int, str], list[int]] = defaultdict(list)
    for row, point in enumerate(points):
        stages, count = len(point.pipeline.stages), point.num_micro_batches
        alike[stages, point.virtual_stages, count, point.schedule].append(row)
    for (_, _, count, schedule), rows in alike.items():
        placed = []
        for row in rows:
            pipeline, lines = points[row].pipeline, prices.lines_of(points[row].work)
            own = [lines[kind] for kind in pipeline.stages]
            placed.append(
                PlacedStages(
                    lines=[line for line in own if line is not None],
                    layers=count_by_chunk(layer_kinds, cuts[row]),
                    transfers=transfer_times(pipeline, space.kinds, lines),
                )
            )
        figures = time_steps(placed, count, schedule, space.scenario)
        found.step_us[rows], found.bubble_ratio[rows] = figures.step_us, figures.bubble_ratio
        found.exposed_ratio[rows] = figures.exposed_ratio
    return found
