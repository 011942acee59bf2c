"""What the closed form says of strategies, as columns, and the figures that follow from it."""

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
