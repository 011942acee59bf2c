"""The closed-form answer of a request: every point counted, the best of them ranked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.training_search import TrainingSearchRequest
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.internevo.points import list_points
from foretoken.simulator.search.training.answers import Answers, list_prices
from foretoken.simulator.search.training.canonical import find_redundant
from foretoken.simulator.search.training.legality import LEGAL, VERDICTS, judge_legality
from foretoken.simulator.search.training.memory_columns import (
    StrategyMemory,
    measure_strategies,
)
from foretoken.simulator.search.training.ranking import Ranking, rank_answers
from foretoken.simulator.search.training.space import PIECE, StrategySpace, resolve_space
from foretoken.simulator.search.training.step_time import StepTimer, StepTimes
from foretoken.simulator.search.training.strategies import Strategies, join_strategies
from foretoken.simulator.search.training.survey import Survey, SurveyRules

# Strategies kept beyond those listed: finalists that turn out not to fit are replaced.
_SPARE = 4
# Hears of every piece that was looked at.
Tell = Callable[[Survey], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """Every point of a space counted, and the best of those that fit, ranked.

    `ranked` are the best in their order, with `ranking` of `survey.kept`; the first `num_listed` of
    them, at the most, are to be listed.
    """

    request: TrainingSearchRequest
    survey: Survey
    prices: Floats
    ranked: Answers | None
    ranking: Ranking | None
    num_listed: int
    num_shapes: int
    model_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the strategies of a space are answered with.

    `memory_ratio` is the memory of devices over what they have.
    """

    predictor: LatencySource
    memory_ratio: float = 1.0
    piece: int = PIECE


def answer_in_closed_form(
    request: TrainingSearchRequest, setting: Setting, tell: Tell
) -> ClosedForm:
    """Return the answer of a request; `tell` hears of every piece that is done.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

    """
    space = resolve_space(request)
    prices = list_prices(space.source.devices, request.space.usd_per_hour)
    num_kept = max(request.max_candidates, _SPARE * request.num_finalists)
    rules = SurveyRules(objective=request.objective, prices=prices, num_kept=num_kept)
    survey = Survey(rules)
    timer = StepTimer(space.source.scenario, setting.predictor)
    num_shapes, model_version = 0, ""
    for legal in _legal_pieces(request, space, survey, setting.piece):
        times, memory = timer.time(legal), measure_strategies(legal)
        num_shapes, model_version = times.num_shapes, times.model_version
        survey.add(_join(legal, times, memory, setting.memory_ratio))
        tell(survey)
    kept = survey.kept
    ranking = None if kept is None else rank_answers(kept, request.objective, prices)
    return ClosedForm(
        request=request,
        survey=survey,
        prices=prices,
        ranked=None if kept is None or ranking is None else kept.take(ranking.order),
        ranking=ranking,
        num_listed=num_kept,
        num_shapes=num_shapes,
        model_version=model_version,
    )


def _legal_pieces(
    request: TrainingSearchRequest, space: StrategySpace, survey: Survey, size: int
) -> Iterator[Strategies]:
    """Yield what can run, about `size` at a time: shapes are lowered once for each piece."""
    is_grid = request.space.enumeration == "grid"
    waiting: list[Strategies] = []
    for strategies in _pieces(request, space, size):
        survey.num_points += len(strategies)
        waiting.append(_judge(strategies, space if is_grid else None, survey))
        if sum(map(len, waiting)) >= size:
            yield join_strategies(waiting)
            waiting = []
    if sum(map(len, waiting)):
        yield join_strategies(waiting)


def _pieces(
    request: TrainingSearchRequest, space: StrategySpace, size: int
) -> Iterator[Strategies]:
    if request.space.enumeration == "grid":
        yield from space.pieces(size)
        return
    points = list_points(space.source, request.space)
    for start in range(0, len(points), size):
        yield points.take(np.arange(start, min(start + size, len(points))))


def _judge(strategies: Strategies, grid: StrategySpace | None, survey: Survey) -> Strategies:
    """Return those that can run and, in a grid, say what no other does; count the rest."""
    verdict = judge_legality(strategies)
    for number, name in enumerate(VERDICTS, 1):
        survey.rule_out(name, strategies, np.asarray(verdict == number, dtype=np.bool_))
    legal = strategies.take(verdict == LEGAL)
    if grid is None:
        return legal
    is_left = np.ones(len(legal), dtype=np.bool_)
    for name, repeats in find_redundant(legal, grid).items():
        survey.rule_out(name, legal, repeats & is_left)
        is_left &= ~repeats
    return legal.take(is_left)


def _join(
    strategies: Strategies, times: StepTimes, memory: StrategyMemory, memory_ratio: float
) -> Answers:
    devices = [find_device(name).memory_bytes for name in strategies.source.devices]
    more = np.array(devices, dtype=np.float64)[strategies.device] * (memory_ratio - 1)
    return Answers(
        strategies=strategies,
        step_us=times.step_us,
        low_us=times.low_us,
        high_us=times.high_us,
        bubble_ratio=times.bubble_ratio,
        exposed_ratio=times.exposed_ratio,
        mfu_ratio=times.mfu_ratio,
        shape=_number_operators(strategies, times.shape),
        reserved_bytes=np.asarray(memory.reserved_bytes, dtype=np.float64),
        margin_bytes=memory.margin_bytes + more,
    )


def _number_operators(strategies: Strategies, shape: Ints) -> Ints:
    """Return what is equal where layers run the same operators on the same device."""
    of_device: Ints = shape * len(strategies.source.devices) + strategies.device
    return of_device * (1 + int(strategies.micro_batch_size.max())) + strategies.micro_batch_size
