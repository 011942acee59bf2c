"""How steps differ among each other: slow devices, a busy network, skipped updates.

A step is timed in columns, one entry per way it can come out, so that two hundred draws cost little
more than one. Draws are lognormal with mean 1, of a fixed seed.

Every device has a speed of its own in a step, and the devices that work on the same layers wait for
the slowest of them. A collective's time is drawn each time it is called, so of many calls only
the mean counts. Data-parallel replicas are alike, and gradients wait for the slowest of them: each
draw of a step takes its replicas from the draws of one.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import Percentiles
from foretoken.domain.units import US_PER_MS, ceil_divide
from foretoken.simulator.steps.call_prices import price_host
from foretoken.simulator.steps.error_parts import NUM_CASES, price_cases
from foretoken.simulator.steps.program import Column
from foretoken.simulator.steps.sharding import SPLITS_PARAMETERS, ScenarioDegrees
from foretoken.simulator.training.operator_prices import Price

# Draws of a step: the median is one of them, and 1 % of them are slower than the 99th percentile.
NUM_DRAWS = 201
_SEED = 20210426
# The columns of the answer: the cases of a price, then the estimate without the calibration.
ESTIMATE, RAW = 0, NUM_CASES
_TYPICAL = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """What makes steps differ; `num_in_step` devices work on the same layers of one replica."""

    straggler_ratio: float = 0.0
    network_ratio: float = 0.0
    overflow_ratio: float = 0.0
    num_in_step: int = 1
    num_replicas: int = 1

    @classmethod
    def of_scenario(cls, scenario: TrainingScenario) -> Self:
        """Return the spread that a scenario states.

        Replicas that exchange tokens or parameters in every layer work in step as well.
        """
        layout, degrees = scenario.layout, ScenarioDegrees.of(scenario)
        of_one, joined = layout.tp * layout.cp, degrees.weight_parts
        if stack_of(scenario.model).experts:
            joined = max(joined, degrees.expert.stride)
        if degrees.state_stage >= SPLITS_PARAMETERS and not degrees.is_once:
            joined = max(joined, degrees.shards * layout.tp)
        joined = min(layout.dp, int(ceil_divide(joined, of_one)))
        return cls(
            straggler_ratio=scenario.straggler_ratio,
            network_ratio=scenario.network_spread_ratio,
            overflow_ratio=scenario.overflow_ratio,
            num_in_step=of_one * joined,
            num_replicas=layout.dp // joined,
        )

    @property
    def has_draws(self) -> bool:
        """Whether steps differ at all."""
        return max(self.straggler_ratio, self.network_ratio, self.overflow_ratio) > 0

    def skipped(self) -> NDArray[np.bool_]:
        """Return which draws skip their update: the asked-for share of them, in random order."""
        is_skipped = np.arange(NUM_DRAWS) < round(self.overflow_ratio * NUM_DRAWS)
        return _stream("overflow").permutation(is_skipped)

    def replicas(self) -> NDArray[np.intp]:
        """Return the other replicas of each draw, as draws: (draw, replica)."""
        shape = (NUM_DRAWS, self.num_replicas - 1)
        return _stream("replicas").integers(NUM_DRAWS, size=shape)


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The ways a step is timed: which case of a price, which draw, calibrated or not."""

    spread: Spread
    cases: NDArray[np.intp]
    draws: NDArray[np.intp]
    is_calibrated: NDArray[np.bool_]

    @classmethod
    def of_draws(cls, spread: Spread) -> Self:
        """Return one column per draw; a single one where none differs from another."""
        draws = np.arange(NUM_DRAWS) if spread.has_draws else np.array([_TYPICAL])
        return cls(spread, np.zeros_like(draws), draws, np.ones_like(draws, dtype=bool))

    @classmethod
    def of_answer(cls, spread: Spread, draw: int) -> Self:
        """Return the columns of the answer, all of one draw."""
        columns = np.arange(RAW + 1)
        draws = np.full_like(columns, draw if spread.has_draws else _TYPICAL)
        return cls(spread, np.where(columns == RAW, ESTIMATE, columns), draws, columns != RAW)

    @property
    def updates(self) -> Column:
        """1 where a step updates its parameters, 0 where an overflow skips that."""
        if not self.spread.overflow_ratio:
            return self.constant(1)
        return self._pick(np.where(self.spread.skipped(), 0.0, 1.0))

    def lag(self, time_us: Column) -> Column | float:
        """Return how much later the slowest replica comes to a point, as a ratio of `time_us`."""
        if self.spread.num_replicas == 1 or len(time_us) < NUM_DRAWS:
            return 1.0
        slowest_us = time_us[self.spread.replicas()].max(axis=1)
        lag: Column = np.maximum(1.0, slowest_us / time_us)
        return lag

    def constant(self, value: float) -> Column:
        """Return the same value in all columns."""
        return np.full(len(self.cases), float(value))

    def price(self, price: Price) -> Column:
        """Return the price of one call, in each column's case."""
        return price.cases_us[self.cases]

    @property
    def host_us(self) -> Column:
        """What a µs of the host takes, in each column's case."""
        cases_us: Column = np.concatenate(price_cases(price_host()))
        return cases_us[self.cases]

    def calibrated(self, value: float, raw: float) -> Column:
        """Return `value` in the columns that are calibrated, `raw` in the others."""
        return np.where(self.is_calibrated, float(value), float(raw))

    def slowness(self, stage: int) -> Column | float:
        """Return what a stage's computation takes over its typical time."""
        if not self.spread.straggler_ratio:
            return 1.0
        shape = (NUM_DRAWS, self.spread.num_in_step)
        factors = _lognormal(f"stage {stage}", self.spread.straggler_ratio, shape)
        slowest: Column = factors.max(axis=1)
        return self._pick(slowest)

    def congestion(self, name: str, num_calls: float) -> Column | float:
        """Return what a collective takes over its typical time, as the mean of its calls."""
        if not self.spread.network_ratio:
            return 1.0
        ratio = self.spread.network_ratio / math.sqrt(max(1.0, num_calls))
        return self._pick(_lognormal(name, ratio, (NUM_DRAWS,)))

    def _pick(self, factors: Column) -> Column:
        return np.where(self.draws == _TYPICAL, 1.0, factors[self.draws]).astype(np.float64)


def summarize(steps_us: Column) -> Percentiles:
    """Return the distribution of a step, in ms."""
    steps_ms = steps_us / US_PER_MS
    p50, p90, p95, p99 = np.percentile(steps_ms, (50, 90, 95, 99), method="higher")
    return Percentiles(
        mean=float(steps_ms.mean()),
        p50=float(p50),
        p90=float(p90),
        p95=float(p95),
        p99=float(p99),
        max=float(steps_ms.max()),
    )


def _lognormal(name: str, ratio: float, shape: tuple[int, ...]) -> Column:
    """Return draws of mean 1 whose standard deviation is `ratio`."""
    sigma = math.sqrt(math.log1p(ratio**2))
    draws: Column = np.exp(_stream(name).standard_normal(shape) * sigma - sigma**2 / 2)
    return draws


def _stream(name: str) -> np.random.Generator:
    return np.random.default_rng((_SEED, zlib.crc32(name.encode())))


def pick_median(steps_us: Column) -> int:
    """Return which of the draws is the median step."""
    return int(np.argsort(steps_us, kind="stable")[len(steps_us) // 2])
