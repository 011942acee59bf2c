"""Leave measured points out, train on the rest, and note what every member says of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.intervals.coverage import map_coverage
from foretoken.predictor.intervals.holdout import Split, SplitKind, split_points
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Points that a fold's model is trained on and asked for: more of them change little of how far it
# is off, and a table of tens of thousands would be trained ten times over.
_MAX_INSIDE, _MAX_OUTSIDE = 8_000, 4_000

# The log ratio of every call (rows) by every member (columns), and the spread of each call.
Answers: TypeAlias = tuple[Matrix, FloatColumn]
# (known points, their log ratios, calls, their tiers) -> answers of a model trained on the former
Ask: TypeAlias = Callable[[Design, FloatColumn, Design, IntColumn], Answers]


# Called now and then by long work; what it raises ends the work.
Heartbeat: TypeAlias = Callable[[], None]


def no_heartbeat() -> None:
    """Do nothing: nobody watches."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """Points left out of training: what every member said of them, and the truth."""

    kind: SplitKind
    points: IntColumn
    answers: Matrix
    spread_log: FloatColumn
    truth_log: FloatColumn
    base_us: FloatColumn
    octaves: FloatColumn
    tiers: IntColumn
    group: IntColumn


@dataclass(frozen=True, slots=True)
class CrossValidation:
    """The measured points of a series, to be left out in parts."""

    spec: OperatorSpec
    design: Design
    log_ratio: FloatColumn
    seed: int
    heartbeat: Heartbeat = no_heartbeat

    def leave_out(self, ask: Ask) -> Iterator[Unseen]:
        """Yield what is said of the points outside each split."""
        rng = np.random.default_rng(self.seed)
        for split in split_points(self.spec, self.design, self.seed):
            self.heartbeat()
            inside = _thin(np.arange(len(split.inside)), _MAX_INSIDE, rng)
            outside = _thin(np.arange(len(split.outside)), _MAX_OUTSIDE, rng)
            rows = split.inside[inside], split.outside[outside]
            yield self._ask(ask, Split(*rows, split.group[outside], split.kind))

    def _ask(self, ask: Ask, split: Split) -> Unseen:
        known, asked = self.design.take(split.inside), self.design.take(split.outside)
        neighbours = PointIndex(known.points).find(asked)
        # What lies beyond the points that are left is no fair test of what lies between them.
        tiers = map_coverage(self.spec, known).tiers(asked, neighbours)
        answers, spread_log = ask(known, self.log_ratio[split.inside], asked, tiers)
        return Unseen(
            kind=split.kind,
            points=asked.points,
            answers=answers,
            spread_log=spread_log,
            truth_log=self.log_ratio[split.outside],
            base_us=asked.base_us,
            octaves=neighbours.distance_octaves,
            tiers=tiers,
            group=split.group,
        )


def _thin(rows: IntColumn, count: int, rng: np.random.Generator) -> IntColumn:
    return rows if len(rows) <= count else np.sort(rng.choice(rows, count, replace=False))
