"""Leave measured points out, train on the rest, and note what every member says of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.intervals.coverage import map_coverage
from foretoken.predictor.intervals.holdout import (
    Fold,
    SplitKind,
    share_models,
    split_points,
    thin_rows,
)
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Points that a fold's model is trained on and each of its splits asked for: more of them change
# little of how far it is off.
_MAX_INSIDE, _MAX_OUTSIDE = 2_500, 1_000


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the points of a series, and which rows of the design of all they are."""

    rows: IntColumn
    design: Design


# The log ratio of every call (rows) by every member (columns), and the spread of each call.
Answers: TypeAlias = tuple[Matrix, FloatColumn]
# (known points, calls, the calls' tiers) -> answers of a model trained on the former
Ask: TypeAlias = Callable[[Part, Part, IntColumn], Answers]


# Called now and then by long work; what it raises ends the work.
Heartbeat: TypeAlias = Callable[[], None]


def no_heartbeat() -> None:
    """Do nothing: nobody watches."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """Points left out of training: what every member said of them, and the truth.

    Those of one `fold` were asked of the same model.
    """

    kind: SplitKind
    fold: int
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
        splits = list(split_points(self.spec, self.design, self.seed))
        for number, fold in enumerate(share_models(splits, self.design.num_rows)):
            self.heartbeat()
            inside = thin_rows(fold.inside, _MAX_INSIDE, rng)
            asked = [split.thin(_MAX_OUTSIDE, rng) for split in fold.splits]
            yield from self._ask(ask, Fold(inside, asked), number)

    def _ask(self, ask: Ask, fold: Fold, number: int) -> Iterator[Unseen]:
        outside = np.concatenate([split.outside for split in fold.splits])
        known, asked = self.design.take(fold.inside), self.design.take(outside)
        neighbours = PointIndex(known.points).find(asked)
        # What lies beyond the points that are left is no fair test of what lies between them.
        tiers = map_coverage(self.spec, known.points, known.axes).tiers(asked, neighbours)
        answers, spread_log = ask(Part(fold.inside, known), Part(outside, asked), tiers)
        end = 0
        for split in fold.splits:
            own = slice(end, end := end + len(split.outside))
            yield Unseen(
                kind=split.kind,
                fold=number,
                points=asked.points[own],
                answers=answers[own],
                spread_log=spread_log[own],
                truth_log=self.log_ratio[split.outside],
                base_us=asked.base_us[own],
                octaves=neighbours.distance_octaves[own],
                tiers=tiers[own],
                group=split.group,
            )
