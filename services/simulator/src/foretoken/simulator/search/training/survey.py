"""Every point of a space counted, and what is kept of them: the best, in a bounded place.

Also how many run and fit where two axes meet, and the best there.

Pieces come one after the other, so a space may be larger than memory: of each only what may be
asked for at the end stays.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.requests.training_search import TRAINING_OBJECTIVES, SpaceCell
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.pareto import pareto_front
from foretoken.simulator.search.training.answers import Answers, join_answers, objective_values
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES, Strategies

_PAIRS = (("tp", "pp"), ("micro_batch_size", "recompute"))
_RADIX = 1 << 31


class CellCounts:
    """Counts by pairs of axes, added up over pieces of a space."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, int], list[int]] = {}
        self._best: dict[tuple[int, int, int], tuple[float, str]] = {}

    def add(self, answers: Answers) -> None:
        """Count strategies that can run."""
        speed = np.where(answers.fits, answers.tokens_per_s_per_gpu, -1.0)
        for number, (row_axis, column_axis) in enumerate(_PAIRS):
            rows = getattr(answers.strategies, row_axis)
            columns = getattr(answers.strategies, column_axis)
            keys, places = np.unique(rows * _RADIX + columns, return_inverse=True)
            num_legal = np.bincount(places, minlength=len(keys))
            num_fitting = np.bincount(places, weights=answers.fits, minlength=len(keys))
            order = np.lexsort((-speed, places))
            best = order[np.searchsorted(places[order], np.arange(len(keys)))]
            for place, key in enumerate(keys.tolist()):
                cell = (number, *divmod(key, _RADIX))
                self._add_cell(cell, int(num_legal[place]), int(num_fitting[place]))
                self._offer(cell, answers, int(best[place]), float(speed[best[place]]))

    def list_cells(self) -> tuple[SpaceCell, ...]:
        """Return the cells, by pair of axes and their values."""
        found = []
        for cell, (num_legal, num_fitting) in sorted(self._counts.items()):
            number, row, column = cell
            row_axis, column_axis = _PAIRS[number]
            speed, name = self._best.get(cell, (0.0, ""))
            found.append(
                SpaceCell(
                    row_axis=row_axis,
                    column_axis=column_axis,
                    row=str(row),
                    column=RECOMPUTE_MODES[column] if column_axis == "recompute" else str(column),
                    num_legal=num_legal,
                    num_fitting=num_fitting,
                    best=name,
                    tokens_per_s_per_gpu=speed,
                )
            )
        return tuple(found)

    def _add_cell(self, cell: tuple[int, int, int], num_legal: int, num_fitting: int) -> None:
        counts = self._counts.setdefault(cell, [0, 0])
        counts[0] += num_legal
        counts[1] += num_fitting

    def _offer(self, cell: tuple[int, int, int], answers: Answers, row: int, speed: float) -> None:
        if speed > self._best.get(cell, (0.0, ""))[0]:
            self._best[cell] = speed, answers.strategies.name(row)


# The verdict of strategies that can run and do not fit.
MEMORY = "memory"

# Returns the low and the high µs of the steps of some rows, [2, row].
Bound = Callable[[Ints], Floats]


@dataclass(frozen=True, kw_only=True, slots=True)
class SurveyRules:
    """What the points are compared by, and how many of the best are kept."""

    objective: str
    prices: Floats
    num_kept: int


class Survey:
    """The counts of a space, and the best of its strategies that fit."""

    def __init__(self, rules: SurveyRules) -> None:
        self._rules = rules
        self._kept: Answers | None = None
        self._cells = CellCounts()
        self._counts: dict[str, int] = {}
        self._examples: dict[str, Strategies] = {}
        self.reasons: dict[str, str] = {}
        self._fastest_out_us = np.inf
        self._values: list[Floats] = []
        self.num_points = 0
        self.num_legal = 0
        self.num_fitting = 0

    @property
    def kept(self) -> Answers | None:
        """The best of those that fit, in no order; None before the first."""
        return self._kept

    @property
    def cells(self) -> tuple[SpaceCell, ...]:
        """The best by pairs of axes."""
        return self._cells.list_cells()

    @property
    def verdicts(self) -> dict[str, tuple[int, Strategies]]:
        """How many are out by each verdict, and one of them; of `memory` the fastest."""
        return {
            name: (count, self._examples[name])
            for name, count in sorted(self._counts.items(), key=lambda item: -item[1])
        }

    def count_better(self, values: Floats) -> Ints:
        """Return how many that fit are before each value of the objective, what is small first."""
        every = np.sort(np.concatenate([np.zeros(0), *self._values]))
        return np.searchsorted(every, values).astype(np.int64)

    def rule_out(self, verdict: str, strategies: Strategies, rows: Flags, reason: str = "") -> None:
        """Count the rows of a mask under a verdict; `reason` says why the first of them is out."""
        count = int(rows.sum())
        if count:
            if reason:
                self.reasons.setdefault(verdict, reason)
            self.count_out(verdict, count, strategies.take(np.flatnonzero(rows)[:1]))

    def count_out(self, verdict: str, count: int, example: Strategies) -> None:
        """Count strategies under a verdict, of which one is the example."""
        self._counts[verdict] = self._counts.get(verdict, 0) + count
        self._examples.setdefault(verdict, example)

    def add(self, answers: Answers, bound: Bound | None = None) -> None:
        """Count strategies that can run, and keep the best that fit.

        `bound` finds the bounds of those that are kept, where answers have none.
        """
        self.num_legal += len(answers)
        fits = answers.fits
        self.num_fitting += int(fits.sum())
        self._cells.add(answers)
        if not fits.all():
            self._add_too_large(answers.take(~fits))
        if fits.any():
            rows = np.flatnonzero(fits)
            fitting = answers.take(rows)
            values = objective_values(fitting, self._rules.objective, self._rules.prices)
            self._values.append(values[0])
            best = self._find_best(fitting)
            found = fitting.take(best)
            if bound is not None:
                low_us, high_us = bound(rows[best])
                found = replace(found, low_us=low_us, high_us=high_us)
            if self._kept is not None:
                found = join_answers([self._kept, found])
                found = found.take(self._find_best(found))
            self._kept = found

    def _add_too_large(self, answers: Answers) -> None:
        self.rule_out(MEMORY, answers.strategies, ~answers.fits)
        fastest = int(np.argmin(answers.step_us / answers.tokens))
        speed_us = float((answers.step_us / answers.tokens)[fastest])
        if speed_us < self._fastest_out_us:
            self._fastest_out_us = speed_us
            self._examples[MEMORY] = answers.strategies.take(np.array([fastest]))

    def _find_best(self, answers: Answers) -> Flags:
        """Tell which are the best by each objective, of each shape, and on a front."""
        rules = self._rules
        if len(answers) <= rules.num_kept:
            return np.ones(len(answers), dtype=np.bool_)
        values = {
            name: objective_values(answers, name, rules.prices)[0] for name in TRAINING_OBJECTIVES
        }
        order = np.lexsort((answers.step_us, values[rules.objective]))
        _, firsts = np.unique(answers.shape[order], return_index=True)
        is_kept = np.zeros(len(answers), dtype=np.bool_)
        is_kept[order[: rules.num_kept]] = True
        is_kept[order[firsts]] = True
        for value in values.values():
            is_kept[np.lexsort((answers.step_us, value))[0]] = True
        for front in find_fronts(answers, rules.prices):
            is_kept |= front
        return is_kept


def find_fronts(answers: Answers, prices: Floats) -> tuple[Flags, Flags]:
    """Return which are on the fronts of cost against throughput, and throughput against memory.

    Throughput is the cluster's where money is compared, a device's where memory is. Without prices
    the first front has nobody.
    """
    everyone = np.ones(len(answers), dtype=np.bool_)
    cost = answers.usd_per_billion_tokens(prices)
    return (
        pareto_front(answers.tokens_per_s, cost, cost > 0),
        pareto_front(answers.tokens_per_s_per_gpu, -answers.margin_bytes, everyone),
    )
