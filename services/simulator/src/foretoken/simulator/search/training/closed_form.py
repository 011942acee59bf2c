"""The closed-form answer of a request: every point counted, the best of them ranked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.internevo.question import list_points
from foretoken.simulator.search.training.answers import (
    Answers,
    list_prices,
    objective_values,
    rank_answers,
)
from foretoken.simulator.search.training.canonical import find_redundant
from foretoken.simulator.search.training.memory import (
    StrategyMemory,
    measure_strategies,
)
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.space import PIECE, StrategySpace, resolve_space
from foretoken.simulator.search.training.step_time import StepTimer, StepTimes
from foretoken.simulator.search.training.survey import Survey, SurveyRules
from foretoken.simulator.search.training.ties import TimedErrors, find_ties, time_errors
from foretoken.simulator.steps.call_prices import Variants
from foretoken.simulator.steps.legality import (
    LEGAL,
    TRAINER,
    VERDICTS,
    judge_legality,
)
from foretoken.simulator.steps.strategies import Strategies, join_strategies

# Strategies kept beyond those listed: finalists that turn out not to fit are replaced.
_SPARE = 4
# Hears of every piece that was looked at.
Tell = Callable[[Survey], None]
# Returns the errors of the steps of strategies.
MeasureErrors = Callable[[Answers], TimedErrors]
# Hears of the answers of a piece, with what else its steps would take.
Hear = Callable[[Answers, Floats], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """Every point of a space counted, and the best of those that fit, ranked.

    `ranked` are the best in their order, of which the first `num_listed` at the most are to be
    listed; `ties` are the rows of those that the error of the estimates cannot tell from the first.
    `notes` are what a reader must know of the answer besides the counts.
    """

    request: TrainingSearchRequest
    survey: Survey
    prices: Floats
    ranked: Answers | None
    ties: Ints
    num_listed: int
    num_shapes: int
    model_version: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the strategies of a space are answered with.

    `memory_ratio` is the memory of devices over what they have. A caller who wants no ties is
    answered sooner, without bounds. `variants` give other prices besides the estimate and its
    bounds, which are the first three; `hear` receives the answers of every piece with µs of their
    steps by the others, (variant, strategy).
    """

    predictor: LatencySource
    variants: Variants | None = None
    hear: Hear | None = None
    memory_ratio: float = 1.0
    piece: int = PIECE
    shapes: ShapeLibrary = field(default_factory=ShapeLibrary)
    has_ties: bool = True


def answer_in_closed_form(
    request: TrainingSearchRequest, setting: Setting, tell: Tell
) -> ClosedForm:
    """Return the answer of a request; `tell` hears of every piece that is done.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

    """
    space = resolve_space(request)
    prices = list_prices(space.source.devices, request.space.usd_per_hour)
    num_kept = count_kept(request)
    rules = SurveyRules(objective=request.objective, prices=prices, num_kept=num_kept)
    survey = Survey(rules)
    timer = StepTimer(space.source.scenario, setting.predictor, setting.variants, setting.shapes)
    num_shapes, model_version = 0, ""
    for legal in _legal_pieces(request, space, survey, setting.piece):
        priced, memory = timer.price(legal), measure_strategies(legal, setting.shapes)
        times = priced.time(has_bounds=False)
        num_shapes, model_version = times.num_shapes, times.model_version
        answers = join_columns(legal, times, memory, setting.memory_ratio)
        survey.add(answers, priced.bound if setting.has_ties else None)
        if setting.hear is not None:
            setting.hear(answers, times.variants_us[1:])
        tell(survey)

    def measure(answers: Answers) -> TimedErrors:
        return time_errors(answers, setting.predictor, setting.shapes)

    ranked, ties = rank_kept(survey, rules, measure if setting.has_ties else None)
    return ClosedForm(
        request=request,
        survey=survey,
        prices=prices,
        ranked=ranked,
        ties=ties,
        num_listed=num_kept,
        num_shapes=num_shapes,
        model_version=model_version,
    )


def count_kept(request: TrainingSearchRequest) -> int:
    """Return how many of the best a search keeps: those listed, and spare ones for finalists."""
    return max(request.max_candidates, _SPARE * request.num_finalists)


def rank_kept(
    survey: Survey, rules: SurveyRules, measure: MeasureErrors | None
) -> tuple[Answers | None, Ints]:
    """Return the best in their order, and the rows that tie with the first if errors are measured.

    Bounds of the survey are of all operators at once, so that nothing that may tie is left out; of
    what is returned they are those of errors that add up as they do in a simulated step.
    """
    kept, nobody = survey.kept, np.zeros(0, dtype=np.int64)
    if kept is None:
        return None, nobody
    ranking = rank_answers(kept, rules.objective, rules.prices)
    ranked = kept.take(ranking.order)
    if measure is None:
        return ranked, nobody
    errors, rows = measure(ranked), np.argsort(ranking.order)[ranking.ties]
    low_us, high_us = errors.of_steps.bound(ranked.step_us)
    ranked = replace(ranked, low_us=low_us, high_us=high_us)
    if rules.objective != "memory_headroom":
        values = objective_values(ranked, rules.objective, rules.prices)[0]
        scaled = errors.of_steps.up_us * (values / ranked.step_us)
        rows = rows[find_ties(scaled, values, errors.correlation)[rows]]
    return ranked, rows[1:]


def _legal_pieces(
    request: TrainingSearchRequest, space: StrategySpace, survey: Survey, size: int
) -> Iterator[Strategies]:
    """Yield what can run, about `size` at a time: shapes are lowered once for each piece."""
    is_grid = request.space.enumeration == "grid"
    waiting: list[Strategies] = []
    if is_grid and space.num_cut:
        survey.num_points += space.num_cut
        survey.count_out(TRAINER, space.num_cut, space.find_cut())
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


def join_columns(
    strategies: Strategies, times: StepTimes, memory: StrategyMemory, memory_ratio: float = 1.0
) -> Answers:
    """Return what is known of strategies on devices of so many times their memory, unbounded."""
    devices = [find_device(name).memory_bytes for name in strategies.source.devices]
    more = np.array(devices, dtype=np.float64)[strategies.device] * (memory_ratio - 1)
    return Answers(
        strategies=strategies,
        step_us=times.step_us,
        low_us=times.step_us,
        high_us=times.step_us,
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
