"""Time of an optimizer step of very many strategies, by formula.

Shapes are lowered and priced once, their passes timed as columns, and steps put together by the
closed forms of the pipeline. A step is that of `simulate_training` where the pipeline's formula is
exact, and near it elsewhere; steps are typical ones, without stragglers and a busy network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.training.shape_library import ShapeGroups, ShapeLibrary
from foretoken.simulator.search.training.strategy_batch import PricedBatch, price_strategies
from foretoken.simulator.steps.call_prices import BOUNDS, CallBook, Variants
from foretoken.simulator.steps.strategies import Strategies


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTimes:
    """One entry per strategy: µs of a step by each variant of the prices, and ratios.

    Variants are the estimate, the low and the high bound of the predictor's interval, and what else
    was asked for; or the same without the bounds. `shape` is equal for strategies whose layers run
    the same operators, of which there are `num_shapes` so far.
    """

    variants_us: Floats
    bubble_ratio: Floats
    exposed_ratio: Floats
    mfu_ratio: Floats
    shape: Ints
    num_shapes: int
    model_version: str

    @property
    def step_us(self) -> Floats:
        """Time of a step by the estimates."""
        return np.asarray(self.variants_us[0])

    @property
    def low_us(self) -> Floats:
        """Time with every operator at its lower bound."""
        return np.asarray(self.variants_us[1])

    @property
    def high_us(self) -> Floats:
        """Time with every operator at its upper bound."""
        return np.asarray(self.variants_us[2])

    @property
    def others_us(self) -> Floats:
        """Times by what else is priced, where the bounds are there."""
        return np.asarray(self.variants_us[3:])


@dataclass(frozen=True, slots=True, eq=False)
class _PricedRows:
    """The rows of strategies on one kind of device."""

    rows: Ints
    batch: PricedBatch


class PricedStrategies:
    """Strategies whose calls are priced: steps are put together for those that are asked for."""

    def __init__(
        self, parts: Sequence[_PricedRows], shape: Ints, num_shapes: int, model_version: str
    ) -> None:
        """Keep the strategies by kind of device, their shapes, and how many there are so far."""
        self._parts = parts
        self._shape = shape
        self._num_shapes = num_shapes
        self._model_version = model_version

    def time(self, *, has_bounds: bool = True) -> StepTimes:
        """Return the steps of all; without bounds they take a good deal less time."""
        length = len(self._shape)
        variants_us, ratios, mfu = np.zeros((3, length)), np.zeros((2, length)), np.zeros(length)
        for part in self._parts:
            every = range(len(part.batch.prices_us))
            wanted = None if has_bounds else [at for at in every if at not in BOUNDS]
            rows, found = part.rows, part.batch.time(variants=wanted)
            if len(variants_us) != len(found.step_us):
                variants_us = np.zeros((len(found.step_us), length))
            variants_us[:, rows] = found.step_us
            ratios[0, rows] = np.clip(1 - found.busy_ratio, 0.0, 1.0)
            ratios[1, rows] = np.minimum(1.0, found.exposed_us / found.step_us[0])
            mfu[rows] = part.batch.mfu_ratio(found.step_us[0])
        return StepTimes(
            variants_us=variants_us,
            bubble_ratio=ratios[0],
            exposed_ratio=ratios[1],
            mfu_ratio=mfu,
            shape=self._shape,
            num_shapes=self._num_shapes,
            model_version=self._model_version,
        )

    def bound(self, rows: Ints) -> Floats:
        """Return the low and the high µs of the steps of some strategies, [2, row]."""
        bounds_us = np.zeros((2, len(rows)))
        for part in self._parts:
            chosen = np.flatnonzero(np.isin(rows, part.rows))
            own = np.searchsorted(part.rows, rows[chosen])
            bounds_us[:, chosen] = part.batch.time(own, BOUNDS).step_us
        return bounds_us


class StepTimer:
    """Times strategies of one space, piece by piece."""

    def __init__(
        self,
        scenario: TrainingScenario,
        predictor: LatencySource,
        variants: Variants | None = None,
        shapes: ShapeLibrary | None = None,
    ) -> None:
        """Keep what strategies vary, and who prices operators.

        `variants` give the prices of all that steps are timed by; else it is estimates and bounds.
        """
        self._variants = variants
        self._library = shapes or ShapeLibrary()
        self._scenario = scenario
        self._predictor = predictor
        self._shapes: dict[tuple[object, ...], int] = {}

    def time(self, strategies: Strategies) -> StepTimes:
        """Return the steps of strategies that can run.

        Raises:
            InvalidRequestError: a layout does not fit the model.

        """
        return self.price(strategies).time()

    def price(self, strategies: Strategies) -> PricedStrategies:
        """Ask what strategies that can run cost, to time as many of them as are wanted.

        Raises:
            InvalidRequestError: a layout does not fit the model.

        """
        parts, version = [], ""
        shape = np.zeros(len(strategies), dtype=np.int64)
        for device in np.unique(strategies.device):
            rows = np.flatnonzero(strategies.device == device)
            some = strategies.take(rows)
            groups, book = self._library.group(some), CallBook(self._variants)
            batch = price_strategies(some, groups, book, self._predictor)
            parts.append(_PricedRows(rows, batch))
            version = batch.model_version
            shape[rows] = self._number_shapes(groups)
        return PricedStrategies(parts, shape, len(self._shapes), version)

    def _number_shapes(self, groups: ShapeGroups) -> Ints:
        numbers = [self._shapes.setdefault(shape.key, len(self._shapes)) for shape in groups.shapes]
        found: Ints = np.array(numbers, dtype=np.int64)[groups.of_strategy]
        return found
