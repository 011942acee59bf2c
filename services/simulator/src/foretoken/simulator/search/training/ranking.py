"""The order of strategies, and which of them the intervals alone cannot tell from the first.

Two strategies whose layers run the same operators (a shape: tp, cp, ep, micro batch and how weights
and tokens are split are alike) share the errors of those operators, so how they differ in pipeline,
states, overlap and recomputation is ranked by the estimates. Of each other shape the best may tie
with the winner where the estimate of each is within the interval of the other; the error of their
difference says whether it does. Memory has no interval: strategies of different shapes tie where
they are equal.
"""

from dataclasses import dataclass

import numpy as np

from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.answers import Answers


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
