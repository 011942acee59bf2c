"""What the best strategy becomes when one thing changes."""

from dataclasses import dataclass, replace

from foretoken.domain.training_search import StrategySensitivity, TrainingSearchRequest
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.faster_predictor import FasterPredictor
from foretoken.simulator.search.training.closed_form import (
    ClosedForm,
    Setting,
    Tell,
    answer_in_closed_form,
)
from foretoken.simulator.search.training.space import halve_batch
from foretoken.simulator.search.training.strategies import AXES, Strategies

_MEMORY_RATIO = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Another question than the one that was asked, in words."""

    words: str
    request: TrainingSearchRequest
    setting: Setting


def list_changes(request: TrainingSearchRequest, predictor: LatencySource) -> tuple[Change, ...]:
    """Return the questions of a sensitivity: faster links, more memory, a smaller batch."""
    # Only the first is told of.
    one = replace(request, max_candidates=1, num_finalists=0)
    as_it_is = Setting(predictor=predictor, has_ties=False)
    faster = FasterPredictor(predictor, "links")
    return (
        Change(
            words="links twice as fast",
            request=one,
            setting=replace(as_it_is, predictor=faster),
        ),
        Change(
            words="memory half as large again",
            request=one,
            setting=replace(as_it_is, memory_ratio=_MEMORY_RATIO),
        ),
        Change(words="half the batch", request=halve_batch(one), setting=as_it_is),
    )


def find_sensitivity(form: ClosedForm, change: Change, tell: Tell) -> StrategySensitivity:
    """Return the best answer of a changed question beside that of the one asked.

    The best of both are the first by the estimates: those that tie with it are not looked at.
    """
    other = answer_in_closed_form(change.request, change.setting, tell)
    found = StrategySensitivity(
        change=change.words,
        best="",
        throughput_ratio=0.0,
        num_fitting=other.survey.num_fitting,
        is_same_best=False,
    )
    if other.ranked is None or form.ranked is None:
        return replace(found, is_same_best=other.ranked is form.ranked)
    before, after = form.ranked, other.ranked
    speed = float(after.tokens_per_s_per_gpu[0])
    name = after.strategies.name(0)
    return replace(
        found,
        best=name,
        step_time_ms=float(after.step_us[0]) / US_PER_MS,
        tokens_per_s_per_gpu=speed,
        throughput_ratio=speed / float(before.tokens_per_s_per_gpu[0]),
        is_same_best=_is_same(before.strategies, after.strategies),
    )


def _is_same(before: Strategies, after: Strategies) -> bool:
    """Tell whether the first strategies of both are one, whatever the batch is."""
    axes = [name for name in AXES if name != "global_batch_size"]
    return all(getattr(before, name)[0] == getattr(after, name)[0] for name in axes)
