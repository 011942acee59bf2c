"""Other questions than the one that was asked: changed hardware, another batch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.hardware_change import HARDWARE_CHANGES, HardwareChange
from foretoken.simulator.search.training.answers import Answers, objective_values
from foretoken.simulator.search.training.survey import SurveyRules
from foretoken.simulator.steps.call_prices import (
    PricedTable,
    estimate_and_bounds,
)
from foretoken.simulator.steps.strategies import Strategies

# Samples of a step over those asked for.
BATCH_CHANGES = {"half the batch": 0.5, "twice the batch": 2.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Another question than the one that was asked, in words."""

    words: str
    request: TrainingSearchRequest
    hardware: HardwareChange


def list_changes(request: TrainingSearchRequest) -> tuple[Change, ...]:
    """Return the questions of a sensitivity, of each of which only the first is reported."""
    one = replace(request, max_candidates=1, num_finalists=0)
    hardware = [
        Change(words=words, request=one, hardware=change)
        for words, change in HARDWARE_CHANGES.items()
    ]
    batches = [
        Change(words=words, request=scale_batch(one, factor), hardware=HardwareChange())
        for words, factor in BATCH_CHANGES.items()
    ]
    return (*hardware, *batches)


def scale_batch(request: TrainingSearchRequest, factor: float) -> TrainingSearchRequest:
    """Return the question for so many times the samples in a step; one sample is the least."""
    sizes = scale_samples(np.array(batch_sizes(request)), factor)
    space = replace(request.space, global_batch_sizes=tuple(sizes.tolist()))
    return replace(request, space=space)


def scale_samples(sizes: Ints, factor: float) -> Ints:
    """Return so many times the samples of steps, rounded down; one sample is the least."""
    return np.maximum(1, (sizes * factor).astype(np.int64))


def batch_sizes(request: TrainingSearchRequest) -> tuple[int, ...]:
    """Return the samples of a step that are asked for."""
    return request.space.global_batch_sizes or (request.scenario.global_batch_size,)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FirstStrategy:
    """The first of strategies by the objective, one row, with its value and µs of a step."""

    strategies: Strategies
    value: float
    step_us: float
    tokens_per_s_per_gpu: float


class FirstFound:
    """The first by the objective of all that fit and were reported, piece by piece."""

    def __init__(self, rules: SurveyRules) -> None:
        self._rules = rules
        self.first: FirstStrategy | None = None
        self.num_fitting = 0

    def add(self, answers: Answers) -> None:
        """Count strategies that fit; of equal ones the first that was reported stays."""
        rows = np.flatnonzero(answers.fits)
        self.num_fitting += len(rows)
        if not len(rows):
            return
        values = objective_values(answers, self._rules.objective, self._rules.prices)[0][rows]
        least = rows[values == values.min()]
        row = least[np.argmin(answers.step_us[least])]
        value, step_us = float(values.min()), float(answers.step_us[row])
        if self.first is None or (value, step_us) < (self.first.value, self.first.step_us):
            one = answers.take(np.array([row]))
            self.first = FirstStrategy(
                strategies=one.strategies,
                value=value,
                step_us=step_us,
                tokens_per_s_per_gpu=float(one.tokens_per_s_per_gpu[0]),
            )


class ChangedHardware:
    """The first strategies of a space on hardware as it is and changed, from one answer for all.

    Changed hardware gives the same operators other prices, and memory another margin: what is
    lowered, and what memory is needed, stays.
    """

    def __init__(self, rules: SurveyRules, changes: Mapping[str, HardwareChange]) -> None:
        self._changes = changes
        self._timed = [words for words, change in changes.items() if change.has_other_times]
        self.found = {words: FirstFound(rules) for words in changes}

    def price(self, priced: PricedTable) -> tuple[Floats, ...]:
        """Return the estimate and its bounds, then the price by each change that alters times."""
        return (
            *estimate_and_bounds(priced),
            *(changed_price(priced, self._changes[words]) for words in self._timed),
        )

    def hear(self, answers: Answers, others_us: Floats) -> None:
        """Find the first by each change, among the answers of a piece."""
        for words, changed in self.change(answers, others_us).items():
            self.found[words].add(changed)

    def change(self, answers: Answers, others_us: Floats) -> dict[str, Answers]:
        """Return answers by each change; `others_us` are the steps by those that alter times."""
        steps_us = dict(zip(self._timed, others_us, strict=True))
        return {
            words: change_answers(answers, change, steps_us.get(words, answers.step_us))
            for words, change in self._changes.items()
        }


def changed_price(priced: PricedTable, change: HardwareChange) -> Floats:
    """Return the estimates of a table on changed hardware."""
    if priced.is_of_host:
        return priced.latency_us
    ratio = change.time_ratio(priced.table, priced.device, priced.topology)
    return priced.latency_us * ratio


def change_answers(answers: Answers, change: HardwareChange, step_us: Floats) -> Answers:
    """Return answers with the steps and the memory of changed hardware."""
    names = answers.strategies.source.devices
    room = np.array([find_device(name).memory_bytes for name in names], dtype=np.float64)
    more = room[answers.strategies.device] * (change.memory_capacity - 1)
    return replace(answers, step_us=step_us, margin_bytes=answers.margin_bytes + more)


def take_batches(answers: Answers, sizes: tuple[int, ...]) -> Answers:
    """Return the answers with one of these global batches."""
    chosen: Flags = np.isin(answers.strategies.global_batch_size, sizes)
    return answers.take(chosen)
