"""What the closed form says of strategies, as columns, the figures that follow, and their order.

Two strategies whose layers run the same operators (a shape: tp, cp, ep, micro batch and how weights
and tokens are split are alike) share the errors of those operators, so how they differ in pipeline,
states, overlap and recomputation is ranked by the estimates. Of each other shape the best may tie
with the winner where the estimate of each is within the interval of the other; the error of their
difference says whether it does. Memory has no interval: strategies of different shapes tie where
they are equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from foretoken.domain.metrics import training
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.steps.strategies import Strategies, join_strategies


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answers:
    """Strategies with what their step takes and holds, one entry each.

    `low_us` and `high_us` are the bounds of the predictor's interval, or the estimate where they
    were not asked for. `shape` is equal where layers run the same operators. `reserved_bytes` is of
    the fullest device of the pipeline, `margin_bytes` what that has left, negative where it has not
    enough.
    """

    strategies: Strategies
    step_us: Floats
    low_us: Floats
    high_us: Floats
    bubble_ratio: Floats
    exposed_ratio: Floats
    mfu_ratio: Floats
    shape: Ints
    reserved_bytes: Floats
    margin_bytes: Floats

    def __len__(self) -> int:
        """Return the number of strategies."""
        return len(self.step_us)

    def take(self, rows: np.ndarray) -> Self:
        """Return some of them, in that order, by their rows or a mask."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return type(self)(strategies=self.strategies.take(rows), **columns)

    @property
    def fits(self) -> Flags:
        """Which have the memory."""
        return np.asarray(self.margin_bytes >= 0, dtype=np.bool_)

    @property
    def tokens(self) -> Floats:
        """Tokens of a step."""
        length = self.strategies.source.scenario.sequence_length
        samples = self.strategies.global_batch_size.astype(np.float64)
        return samples * length

    @property
    def tokens_per_s(self) -> Floats:
        """Tokens per second of the whole cluster."""
        return np.asarray(training.tokens_per_s(self._totals()))

    @property
    def tokens_per_s_per_gpu(self) -> Floats:
        """Tokens per second of a device."""
        return np.asarray(training.tokens_per_s_per_gpu(self._totals()))

    def usd_per_step(self, prices: Floats) -> Floats:
        """Return the money of a step, by the hourly price of each device of the space."""
        return np.asarray(training.usd_per_step(self._totals(prices)))

    def usd_per_billion_tokens(self, prices: Floats) -> Floats:
        """Return the money of a billion tokens."""
        return np.asarray(training.usd_per_billion_tokens(self._totals(prices)))

    def _totals(self, prices: Floats | None = None) -> training.StepTotals:
        strategies = self.strategies
        return training.StepTotals(
            step_us=self.step_us,
            num_tokens=self.tokens,
            num_devices=strategies.num_devices,
            usd_per_hour=0.0 if prices is None else prices[strategies.device],
        )


_COLUMNS = tuple(item.name for item in fields(Answers) if item.name != "strategies")


def join_answers(parts: Sequence[Answers]) -> Answers:
    """Return all answers together; there is at least one part."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return Answers(strategies=join_strategies([part.strategies for part in parts]), **columns)


def list_prices(devices: Sequence[str], usd_per_hour: Mapping[str, float]) -> Floats:
    """Return the hourly price of each device in turn, 0 where it has none."""
    return np.array([usd_per_hour.get(device, 0.0) for device in devices], dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """`order` of all rows by the estimates, best first; `rank` of each in that order, from 1.

    `ties` are the rows that may tie, in that order: the first is the winner.
    """

    order: Ints
    rank: Ints
    ties: Ints


def rank_values(values: Floats, groups: Ints, tie_breaks: Floats) -> Ranking:
    """Return the order by [estimate, low, high] of what is to be small, [3, row].

    What is equal goes by `tie_breaks`, the smaller first. The best row of each group may tie with
    the winner where the estimate of each is within the bounds of the other.
    """
    estimate, low, high = values
    order: Ints = np.lexsort((tie_breaks, estimate)).astype(np.int64)
    rank: Ints = np.arange(1, len(order) + 1, dtype=np.int64)
    if len(order) == 0:
        return Ranking(order=order, rank=rank, ties=order)
    _, firsts = np.unique(groups[order], return_index=True)
    best = order[np.sort(firsts)]
    winner = order[0]
    ties = best[(low[best] <= estimate[winner]) & (estimate[best] <= high[winner])]
    return Ranking(order=order, rank=rank, ties=ties)


def rank_answers(answers: Answers, objective: str, prices: Floats) -> Ranking:
    """Return the order of strategies by one of `TRAINING_OBJECTIVES`; equal ones go by the step."""
    values = objective_values(answers, objective, prices)
    return rank_values(values, answers.shape, answers.step_us)


def objective_values(answers: Answers, objective: str, prices: Floats) -> Floats:
    """Return [estimate, low, high] of what is to be small, [3, strategy]."""
    if objective == "memory_headroom":
        return np.stack([-answers.margin_bytes] * 3)
    steps = np.stack([answers.step_us, answers.low_us, answers.high_us])
    if objective == "step_time":
        return steps
    per_step = answers.strategies.num_devices / answers.tokens
    if objective == "cost":
        per_step = per_step * prices[answers.strategies.device]
    return steps * per_step
