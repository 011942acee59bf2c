"""A line of the listing: many scores made one figure, next to what peers reach and the goal."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from accuracy.trial import Score

_HEADER = (
    f"{'family':24} {'points left out':22} {'MAPE / P90':>12} {'+-':>5} {'in 90 %':>8} "
    f"{'width':>7} {'outside':>8} {'worst':>7} {'peer':>17} {'goal':>10} {'tables':>7} "
    f"{'points':>8} worst table"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Percent: mean error, and the error that 90 % of points stay under where that is said."""

    mape: float
    p90: float | None = None

    def __str__(self) -> str:
        """Write as in the goals."""
        return f"{self.mape:.1f}" + (f"/{self.p90:.3g}" if self.p90 is not None else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Median over tables of each table's mean over seeds, in percent.

    `spread` is half the distance of the best from the worst seed's median MAPE; `coverage`,
    `width` and `outside` are means over tables, every table counting the same. `worst` is the mean
    error of the table that is named, the largest of all.
    """

    family: str
    split: str
    found: Figure
    peer: str = ""
    goal: Figure | None = None
    spread: float | None = None
    coverage: float | None = None
    width: float | None = None
    outside: float | None = None
    worst: float | None = None
    worst_table: str = ""
    num_tables: int = 0
    num_points: int = 0

    @property
    def text(self) -> str:
        """One line, as wide as the header."""
        return (
            f"{self.family:24} {self.split:22} {self.found!s:>12} {_number(self.spread):>5} "
            f"{_number(self.coverage):>8} {_number(self.width):>7} {_number(self.outside):>8} "
            f"{_number(self.worst):>7} {self.peer:>17} {self.goal or ''!s:>10} "
            f"{self.num_tables:7} {self.num_points:8} {self.worst_table}"
        )


@dataclass(slots=True)
class Scores:
    """Scores of one question, by table and seed."""

    by_table: dict[str, dict[int, Score]] = field(default_factory=dict)

    def add(self, table: str, seed: int, score: Score) -> None:
        """Keep one."""
        self.by_table.setdefault(table, {})[seed] = score

    def summarise(self, family: str, split: str, peer: str, goal: Figure | None) -> Line | None:
        """Return the line, None where nothing could be asked."""
        tables = [list(scores.values()) for scores in self.by_table.values()]
        if not tables:
            return None
        every = [score for scores in tables for score in scores]
        medians = list(self._medians_by_seed())
        worst, worst_table = max(
            (_mean(list(scores.values()), "mape"), name) for name, scores in self.by_table.items()
        )
        return Line(
            family=family,
            split=split,
            found=Figure(
                float(np.median([_mean(scores, "mape") for scores in tables])),
                float(np.median([_mean(scores, "p90") for scores in tables])),
            ),
            peer=peer,
            goal=goal,
            spread=(max(medians) - min(medians)) / 2.0,
            coverage=float(np.mean([_mean(scores, "coverage") for scores in tables])),
            width=float(np.mean([_mean(scores, "width") for scores in tables])),
            outside=float(np.mean([_mean(scores, "outside") for scores in tables])),
            worst=worst,
            worst_table=worst_table,
            num_tables=len(tables),
            num_points=sum(score.num_points for score in every),
        )

    def _medians_by_seed(self) -> Iterator[float]:
        seeds = sorted({seed for scores in self.by_table.values() for seed in scores})
        for seed in seeds:
            found = [scores[seed].mape for scores in self.by_table.values() if seed in scores]
            yield 100.0 * float(np.median(found))


def write_listing(lines: Iterable[Line]) -> str:
    """Return the lines under a header."""
    return "\n".join([_HEADER, *(line.text for line in lines)])


def lines_to_plain(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return plain data for JSON."""
    return [asdict(line) for line in lines]


def _mean(scores: list[Score], name: str) -> float:
    return 100.0 * float(np.mean([getattr(score, name) for score in scores]))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
