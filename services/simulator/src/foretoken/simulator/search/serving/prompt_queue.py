"""How long prompts wait on replicas that compute all that have come in one pass.

A pass of k prompts takes `fixed + k * marginal` and begins when the one before is over, with the
prompts that came meanwhile, or with the next one to come. Below saturation few come meanwhile: most
passes have one prompt, however many could be computed together. Nothing is fitted.
"""

from dataclasses import dataclass

import numpy as np

from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Floats, Ints

# A replica whose rate is met exactly has an endless queue.
_LEAST = 1e-12
_FEWEST_TOGETHER = 2.0
# Halvings in the search for a rate: to a millionth of the most.
_NUM_HALVINGS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPasses:
    """[variant, setting] of what a replica's passes take, in µs.

    `alone_us` is the TTFT of a prompt that meets no other, `single_us` how long its pass keeps the
    replica, `each_us` the share of each of the `most` prompts of a full pass.
    """

    alone_us: Floats
    single_us: Floats
    each_us: Floats
    most: Floats

    @property
    def full_rps(self) -> Floats:
        """What a replica carries whose passes are full, in prompts/s."""
        return np.divide(
            US_PER_S, self.each_us, out=np.zeros(self.each_us.shape), where=self.each_us > 0
        )

    @property
    def is_single(self) -> np.ndarray:
        """Where no pass has two whole prompts."""
        return np.asarray(self.most < _FEWEST_TOGETHER)

    def take(self, rows: np.ndarray) -> "PromptPasses":
        """Return some settings, in that order."""
        return PromptPasses(
            alone_us=self.alone_us[:, rows],
            single_us=self.single_us[:, rows],
            each_us=self.each_us[:, rows],
            most=self.most[:, rows],
        )


def random_wait_us(
    passes: PromptPasses, rate_rps: Floats, second_ratio: float, num_replicas: Ints
) -> Floats:
    """Return how much longer than alone prompts take that come at random to several replicas.

    `rate_rps` is that of each, [variant, setting]. One replica by itself: passes H of B prompts, of
    which `rate E[H^2] / 2 E[B]` is the wait for the pass in progress, besides the others of one's
    own; `E[H^2]` follows from what comes during one pass being the next, and `E[B]` at its least
    makes the wait an upper bound (Inoue, 2021, "Queueing analysis of GPU-based inference servers
    with dynamic batching", here with prompts of different lengths). Full passes are as M/G/1 of a
    prompt at a time at their speed, which is a lower bound. Several: as much less as in M/M/c (Lee
    and Longton, 1959).
    """
    rate = rate_rps / US_PER_S
    busy = np.minimum(rate * passes.each_us, 1.0 - _LEAST)
    queue_us = passes.each_us * second_ratio / 2 * busy / (1.0 - busy)
    fixed, marginal = _costs_us(passes)
    passed = np.minimum(rate * marginal, 1.0 - _LEAST)
    # One, or as many as come during a pass.
    fewest = np.maximum(rate * fixed / (1.0 - passed), 1.0)
    squares = fixed**2 / fewest + 2 * fixed * marginal + second_ratio * marginal**2
    together_us = rate * (0.5 + passed) * squares / (1.0 - passed**2)
    together_us = np.where(passes.is_single, 0.0, together_us)
    offered: Floats = busy * num_replicas
    shared = _erlang_c(offered, num_replicas) / np.maximum(offered, _LEAST)
    wait_us: Floats = np.maximum(queue_us, together_us) * shared
    return wait_us


def busiest_rps(passes: PromptPasses, second_ratio: float, left_us: Floats) -> Floats:
    """Return the most that a replica by itself carries while prompts wait `left_us` at most."""
    low, high = np.zeros(passes.each_us.shape), passes.full_rps
    one = np.ones(passes.each_us.shape[-1], dtype=np.int64)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        is_in_time = random_wait_us(passes, middle, second_ratio, one) <= left_us
        low, high = np.where(is_in_time, middle, low), np.where(is_in_time, high, middle)
    return low


def _costs_us(passes: PromptPasses) -> tuple[Floats, Floats]:
    """Return what a pass takes at any number of prompts, and for each of them."""
    more = passes.most - 1.0
    grown_us = passes.most * passes.each_us - passes.single_us
    marginal = np.divide(grown_us, more, out=passes.single_us.copy(), where=more > 0)
    marginal = np.clip(marginal, 0.0, passes.single_us)
    return passes.single_us - marginal, marginal


def _erlang_c(offered: Floats, num_servers: Ints) -> Floats:
    """Return the share of arrivals that find all servers busy: M/M/c, by Erlang's recursion."""
    blocked = np.ones(offered.shape)
    for server in range(1, int(num_servers.max(initial=1)) + 1):
        refused = offered * blocked / (server + offered * blocked)
        blocked = np.where(server <= num_servers, refused, blocked)
    busy = np.minimum(offered / num_servers, 1.0)
    found: Floats = blocked / np.maximum(1.0 - busy * (1.0 - blocked), _LEAST)
    return found
