"""Strategies simulated event by event, on the workers of searches.

Workers have no predictor. A task that needs an answer it was not given returns the question; it is
asked here and the task done again with the answer, so a strategy costs two tasks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.domain import schema
from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import (
    MemoryColumns,
    SpanColumns,
    TrafficColumns,
    TrainingReport,
)
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.search.journal import fingerprint
from foretoken.simulator.training.step import simulate_training


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the predictor said to a question."""

    query: LatencyQuery
    reply: LatencyReply


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyTask:
    """A strategy to simulate, with the answers it is known to need."""

    scenario: TrainingScenario
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOutcome:
    """A simulated strategy, or the question that the simulation needs an answer to."""

    report: TrainingReport | None = None
    query: LatencyQuery | None = None


def simulate_strategy(task: StrategyTask, _: None) -> StrategyOutcome:
    """Return the step of a strategy without its timelines, or what must be asked for it.

    Raises:
        InvalidRequestError: the strategy cannot run.

    """
    try:
        report = simulate_training(task.scenario, KnownAnswers(task.answers), None)
    except UnknownAnswerError as err:
        return StrategyOutcome(query=err.query)
    return StrategyOutcome(
        report=replace(
            report,
            spans=SpanColumns(),
            memory_timeline=MemoryColumns(),
            traffic=TrafficColumns(),
        )
    )


def weigh_simulated(
    report: TrainingReport, objective: str, num_devices: float, num_samples: float, usd: float
) -> float:
    """Return what is to be small of a simulated strategy, by one of `TRAINING_OBJECTIVES`.

    A step has `num_samples`, and an hour of all devices costs `usd`.
    """
    if objective == "memory_headroom":
        return -min((stage.margin_bytes for stage in report.memory), default=0.0)
    if objective == "step_time":
        return report.step_time_ms
    factor = usd if objective == "cost" else num_devices
    return report.step_time_ms / num_samples * factor


class KnownAnswers:
    """A predictor that knows the answers to some questions, and no other."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._replies = {fingerprint(answer.query): answer.reply for answer in answers}

    def list_models(self) -> Sequence[ModelVersion]:
        """Return none: the answers name the version they are of."""
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return the answer to a question that is known.

        Raises:
            UnknownAnswerError: it is not.

        """
        reply = self._replies.get(fingerprint(query))
        if reply is None:
            raise UnknownAnswerError(query)
        return reply


class UnknownAnswerError(Exception):
    """A question came up that has no answer yet."""

    def __init__(self, query: LatencyQuery) -> None:
        super().__init__(query.device)
        self.query = query


class StrategyRuns:
    """Simulates strategies on the workers of a search."""

    def __init__(self, predictor: LatencySource) -> None:
        self._predictor = predictor

    def run(
        self, scenarios: Sequence[TrainingScenario], context: SearchContext
    ) -> Iterator[tuple[int, TrainingReport]]:
        """Yield the place and report of every scenario as it is done; reports have no timelines.

        Raises:
            CancelledJobError: the job was cancelled.
            InvalidRequestError: a strategy cannot run.

        """
        waiting = {place: StrategyTask(scenario=item) for place, item in enumerate(scenarios)}
        while waiting:
            places = list(waiting)
            tasks = [waiting[place] for place in places]
            waiting = {}
            for index, outcome in context.run(simulate_strategy, tasks, None):
                if outcome.query is not None:
                    waiting[places[index]] = self._answer(tasks[index], outcome.query)
                elif outcome.report is not None:
                    yield places[index], outcome.report

    def _answer(self, task: StrategyTask, query: LatencyQuery) -> StrategyTask:
        answer = Answer(query=query, reply=self._predictor.predict(query))
        return replace(task, answers=(*task.answers, answer))


def encode_scenario(scenario: TrainingScenario) -> str:
    """Return a scenario as JSON."""
    return json.dumps(schema.encode(scenario))
