"""How many strategies of a space run and fit where two of its axes meet, and the best there."""

import numpy as np

from foretoken.domain.requests.training_search import SpaceCell
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES

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
