"""What the best strategy becomes when one thing changes."""

from dataclasses import replace

import numpy as np

from foretoken.domain.requests.training_search import StrategySensitivity, TrainingSearchRequest
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.hardware_change import HARDWARE_CHANGES
from foretoken.simulator.search.training.answers import Answers, list_prices, objective_values
from foretoken.simulator.search.training.changes import (
    BATCH_CHANGES,
    ChangedHardware,
    FirstFound,
    batch_sizes,
    scale_batch,
    scale_samples,
    take_batches,
)
from foretoken.simulator.search.training.closed_form import (
    ClosedForm,
    Setting,
    Tell,
    answer_in_closed_form,
    join_columns,
)
from foretoken.simulator.search.training.memory import measure_strategies
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.search.training.survey import SurveyRules
from foretoken.simulator.steps.legality import LEGAL, judge_legality
from foretoken.simulator.steps.strategies import Strategies

# Values that differ by less, in proportion, are one.
_EQUAL = 1e-9


class Sensitivities:
    """Answers a request under every change: hardware with the request itself, then batches."""

    def __init__(self, request: TrainingSearchRequest, predictor: LatencySource) -> None:
        self._request, self._predictor = request, predictor
        devices = tuple(dict.fromkeys(request.space.devices or (request.scenario.device,)))
        self._rules = SurveyRules(
            objective=request.objective,
            prices=list_prices(devices, request.space.usd_per_hour),
            num_kept=1,
        )
        self._hardware = ChangedHardware(self._rules, HARDWARE_CHANGES)
        # Other batches run the same shapes.
        self._shapes = ShapeLibrary()

    @property
    def setting(self) -> Setting:
        """What the request itself is to be answered with, for changed hardware to be heard of."""
        return Setting(
            predictor=self._predictor,
            variants=self._hardware.price,
            hear=self._hardware.hear,
            shapes=self._shapes,
        )

    def find(self, form: ClosedForm, tell: Tell) -> tuple[StrategySensitivity, ...]:
        """Return the best under every change next to that of the request, answered by `setting`.

        The best are the first by the estimates: those that tie with them are not looked at.
        """
        found = {**self._hardware.found, **self._ask_batches(tell)}
        same = {} if form.ranked is None else self._answer_same(form.ranked.strategies)
        return tuple(
            self._compare(form.ranked, words, first, same.get(words))
            for words, first in found.items()
        )

    def _ask_batches(self, tell: Tell) -> dict[str, FirstFound]:
        """Return the first by each batch; all are asked for at once, as they share operators."""
        asked = {
            words: batch_sizes(scale_batch(self._request, factor))
            for words, factor in BATCH_CHANGES.items()
        }
        found = {words: FirstFound(self._rules) for words in asked}

        def hear(answers: Answers, _: np.ndarray) -> None:
            for words, sizes in asked.items():
                found[words].add(take_batches(answers, sizes))

        every = tuple(dict.fromkeys(size for sizes in asked.values() for size in sizes))
        space = replace(self._request.space, global_batch_sizes=every)
        request = replace(self._request, space=space, max_candidates=1, num_finalists=0)
        setting = Setting(predictor=self._predictor, hear=hear, shapes=self._shapes, has_ties=False)
        answer_in_closed_form(request, setting, tell)
        return found

    def _answer_same(self, ranked: Strategies) -> dict[str, Answers]:
        """Return today's best under every change that it can run with."""
        best = ranked.take(np.zeros(1, dtype=np.int64))
        wanted = {
            words: replace(best, global_batch_size=scale_samples(best.global_batch_size, factor))
            for words, factor in BATCH_CHANGES.items()
        }
        price, shapes = self._hardware.price, self._shapes
        timer = StepTimer(best.source.scenario, self._predictor, price, shapes)
        answers, others_us = _answer(best, timer)
        found = self._hardware.change(answers, others_us)
        for words, strategies in wanted.items():
            if judge_legality(strategies)[0] == LEGAL:
                found[words] = _answer(strategies, timer)[0]
        return found

    def _compare(
        self, ranked: Answers | None, words: str, found: FirstFound, same: Answers | None
    ) -> StrategySensitivity:
        first = found.first
        none = StrategySensitivity(
            change=words,
            best="",
            throughput_ratio=0.0,
            num_fitting=found.num_fitting,
            is_same_best=ranked is None and first is None,
        )
        if first is None:
            return none
        answer = replace(
            none,
            best=first.strategies.name(0),
            step_time_ms=first.step_us / US_PER_MS,
            tokens_per_s_per_gpu=first.tokens_per_s_per_gpu,
        )
        if ranked is None:
            return answer
        # Of other batches, too, names tell what the request varies.
        named = replace(first.strategies, source=ranked.strategies.source)
        today = float(ranked.tokens_per_s_per_gpu[0])
        ratio = first.tokens_per_s_per_gpu / today
        answer = replace(answer, best=named.name(0), throughput_ratio=ratio)
        if same is None or not same.fits[0]:
            return answer
        value = objective_values(same, self._rules.objective, self._rules.prices)[0, 0]
        is_same = bool(value - first.value <= _EQUAL * abs(first.value))
        return replace(
            answer,
            best=same.strategies.name(0) if is_same else answer.best,
            same_throughput_ratio=float(same.tokens_per_s_per_gpu[0]) / today,
            is_same_best=is_same,
        )


def _answer(strategies: Strategies, timer: StepTimer) -> tuple[Answers, np.ndarray]:
    """Return the answers of strategies, and their steps by what else is priced."""
    times = timer.time(strategies)
    answers = join_columns(strategies, times, measure_strategies(strategies))
    return answers, times.others_us
