"""What was priced of the stages of a mixed cluster, by kind of node and by work."""

from collections.abc import Mapping, Sequence

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.placement.sample import Samples
from foretoken.simulator.search.placement.stage_cost import (
    BOUNDS,
    PriceCases,
    StageLines,
    StageMeter,
)
from foretoken.simulator.search.placement.strategy import (
    PlacedStrategy,
    PlacementSpace,
    StageWork,
)


class StagePrices:
    """The lines of all stages of a search, each kind of node in one question to a predictor."""

    def __init__(
        self,
        space: PlacementSpace,
        samples: Samples,
        predictor: LatencySource,
        cases: PriceCases = BOUNDS,
    ) -> None:
        """Take what is priced, and the cases it is priced in."""
        self._space, self._predictor = space, predictor
        self._meter = StageMeter(space.scenario, samples, cases)
        self.num_cases = cases.num_cases
        self._lines: list[dict[StageWork, StageLines]] = []
        self._refused: list[dict[StageWork, InvalidRequestError]] = []
        self._versions: list[str] = []

    @property
    def num_shapes(self) -> int:
        """Kinds of work on kinds of nodes that were priced."""
        return sum(len(lines) for lines in self._lines)

    @property
    def model_version(self) -> str:
        """The versions of the predictor's models."""
        return ", ".join(dict.fromkeys(filter(None, self._versions)))

    def measure(self, points: Sequence[PlacedStrategy]) -> None:
        """Lower and price what the stages of strategies do on every kind of node."""
        for kind, nodes in enumerate(self._space.kinds):
            lines, refused, version = self._meter.measure(
                kind, nodes, _works_on(kind, points), self._predictor
            )
            self._lines.append(lines)
            self._refused.append(refused)
            self._versions.append(version)

    def lines_of(self, work: StageWork) -> list[StageLines | None]:
        """Return the lines of a work on each kind of node; none where nothing works so."""
        return [lines.get(work) for lines in self._lines]

    def error_of(self, point: PlacedStrategy) -> InvalidRequestError | None:
        """Return why the stages of a strategy cannot work so, if they cannot."""
        errors = (self._refused[kind].get(point.work) for kind in set(point.pipeline.stages))
        return next((error for error in errors if error is not None), None)


def _works_on(kind: int, points: Sequence[PlacedStrategy]) -> Mapping[StageWork, bool]:
    """Return the works of a kind of node, and whether each also has the model on one stage."""
    works: dict[StageWork, bool] = {}
    for point in points:
        if kind in point.pipeline.stages:
            is_alone = len(point.pipeline.stages) == 1
            works[point.work] = works.get(point.work, False) or is_alone
    return works
