"""Which strategies are simulated, and their places by what the simulations say."""

from foretoken.domain.requests.training_search import StrategyFinalist, TrainingSearchRequest
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.grid import Floats
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.finalists import encode_scenario, weigh_simulated

# Simulations for each finalist that is wanted, at the most.
_MAX_TRIES = 4


class FinalistSelection:
    """The first strategies of a ranking; the next takes the place of one that does not fit."""

    def __init__(self, request: TrainingSearchRequest, ranked: Answers, prices: Floats) -> None:
        """Take strategies in their order, and the hourly price of each device of their space."""
        self._objective, self._num_wanted = request.objective, request.num_finalists
        self._ranked = ranked
        self._prices = prices
        self._reports: dict[int, TrainingReport] = {}

    @property
    def num_simulated(self) -> int:
        """Strategies that were simulated."""
        return len(self._reports)

    def next_rows(self) -> list[int]:
        """Return the rows to simulate next; none where enough fit, or too many did not."""
        num_missing = self._num_wanted - len(self._places())
        num_left = _MAX_TRIES * self._num_wanted - len(self._reports)
        first = len(self._reports)
        return list(range(first, min(first + min(num_missing, num_left), len(self._ranked))))

    def tell(self, row: int, report: TrainingReport) -> None:
        """Take note of a simulation."""
        self._reports[row] = report

    def finalist(self, row: int) -> StrategyFinalist:
        """Return a strategy that was simulated, with its place among all that were by now."""
        strategies = self._ranked.strategies
        return StrategyFinalist(
            candidate=row,
            name=strategies.name(row),
            rank=self._places().get(row, 0),
            closed_form_ms=float(self._ranked.step_us[row]) / US_PER_MS,
            report=self._reports[row],
            scenario_json=encode_scenario(strategies.scenario(row)),
        )

    def finalists(self) -> tuple[StrategyFinalist, ...]:
        """Return all that were simulated, the best first, those that do not fit last."""
        found = [self.finalist(row) for row in sorted(self._reports)]
        return tuple(sorted(found, key=lambda item: (item.rank == 0, item.rank)))

    def _places(self) -> dict[int, int]:
        """Return the place of each row that fits, from 1."""
        values = {
            row: self._value(row, report)
            for row, report in self._reports.items()
            if report.feasibility.is_feasible
        }
        order = sorted(values, key=lambda row: (values[row], row))
        return {row: place for place, row in enumerate(order, 1)}

    def _value(self, row: int, report: TrainingReport) -> float:
        """Return what is to be small."""
        strategies = self._ranked.strategies
        num_devices = int(strategies.num_devices[row])
        return weigh_simulated(
            report,
            self._objective,
            num_devices,
            int(strategies.global_batch_size[row]),
            float(self._prices[strategies.device[row]]) * num_devices,
        )
