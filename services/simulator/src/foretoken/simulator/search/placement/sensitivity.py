"""What the best strategy of a mixed cluster becomes when one thing changes: all is asked again."""

from dataclasses import replace

import numpy as np

from foretoken.domain.requests.training_search import StrategySensitivity
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.hardware_change import FasterPredictor
from foretoken.simulator.search.placement.closed_form import answer_placements
from foretoken.simulator.search.placement.columns import PlacedStrategies
from foretoken.simulator.search.placement.stage_memory import StageBook
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.changes import Change
from foretoken.simulator.search.training.closed_form import ClosedForm, Setting, Tell


def find_placed_sensitivity(
    form: ClosedForm, change: Change, book: StageBook, predictor: LatencySource, tell: Tell
) -> StrategySensitivity:
    """Return the best of one changed question next to that of the request.

    The best are the first by the estimates: those that tie with them are not looked at. Layers are
    cut anew, of today's best too.
    """
    setting = Setting(
        predictor=FasterPredictor(predictor, change.hardware),
        memory_ratio=change.hardware.memory_capacity,
        has_ties=False,
    )
    # All are kept, so that today's best is among them.
    request = replace(change.request, max_candidates=max(1, form.survey.num_points))
    other = answer_placements(request, book, setting, tell)
    found = StrategySensitivity(
        change=change.words,
        best="",
        throughput_ratio=0.0,
        num_fitting=other.survey.num_fitting,
        is_same_best=other.ranked is form.ranked,
    )
    if other.ranked is None:
        return found
    after = other.ranked
    speed = float(after.tokens_per_s_per_gpu[0])
    found = replace(
        found,
        best=after.strategies.name(0),
        step_time_ms=float(after.step_us[0]) / US_PER_MS,
        tokens_per_s_per_gpu=speed,
    )
    if form.ranked is None:
        return found
    today = float(form.ranked.tokens_per_s_per_gpu[0])
    found = replace(found, throughput_ratio=speed / today)
    row = _find_same(form.ranked, after)
    if row is None:
        return found
    return replace(
        found,
        same_throughput_ratio=float(after.tokens_per_s_per_gpu[row]) / today,
        is_same_best=row == 0,
    )


def _find_same(before: Answers, after: Answers) -> int | None:
    """Return the row of what was the first before, if it fits still."""
    strategies, others = before.strategies, after.strategies
    if not (isinstance(strategies, PlacedStrategies) and isinstance(others, PlacedStrategies)):
        raise TypeError("strategies of a mixed cluster are columns of their own")
    # Spaces list their points in one order, whatever the batch is.
    rows = np.flatnonzero(others.point == strategies.point[0])
    return int(rows[0]) if len(rows) else None
