"""How many planned points a GEMM model needs for 5 % and for 4 %, against random ones and a grid.

Run: python tests/benchmarks/bench_plan.py [DATA_FOLDER]

Points are planned in rounds, as a user would: plan, measure (look up in the table), learn, plan
again. With a sibling the planner and the model know the tables of other devices.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from accuracy.source import AICONFIGURATOR, import_sources
from accuracy.table import Integers, Mask, split_into_tables, take
from accuracy.trial import CONFIG

from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.planning.profile_plan import PlanQuestion, rank_points
from foretoken.predictor.regression.kriging import Scales, learn_scales
from foretoken.predictor.series import Series
from foretoken.predictor.transfer.device_transfer import train_transfer_series
from foretoken.predictor.transfer.library import DonorLibrary
from foretoken.predictor.transfer.pool import DonorPool

_DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_DEVICE, _SIBLING = "h200_sxm", "gb200"
_GOALS_RATIO = (0.05, 0.04)
_STEPS = (50, 80, 120, 200, 300, 450, 700, 900, 1_200, 1_700, 2_500)
_GRID_STEPS = (*_STEPS, 5_000)
_NUM_JUDGED = 6_000
_NUM_SCALED = 3_000
_SEED = 0

Choose = Callable[[int, Integers], Integers]


class Table:
    """A dense table that stands for the device: measuring is looking up."""

    def __init__(self, series: Series) -> None:
        """Build the design of every point."""
        self.series = series
        self.design = series.design
        self.log_ratio = np.log(series.latency_us / self.design.base_us)

    def error_ratio(self, chosen: Integers, pool: DonorPool | None) -> float:
        """Return the MAPE on the rest of the table of a model of the chosen points."""
        known = take(self.series, np.sort(chosen))
        model = train_transfer_series(known, pool, CONFIG, _SEED)
        rest = np.setdiff1d(np.arange(len(self.log_ratio)), chosen)
        judged = np.random.default_rng(_SEED).choice(rest, _NUM_JUDGED, replace=False)
        asked = self.design.take(judged)
        tiers = np.full(asked.num_rows, int(Tier.GRID))
        found_log = model.regressor.predict(asked, tiers).log_ratio
        return float(np.abs(np.expm1(found_log - self.log_ratio[judged])).mean())

    def plan(self, scales: Scales | None) -> Choose:
        """Return the planner; without a sibling's scales it learns them from its own points."""

        def choose(count: int, chosen: Integers) -> Integers:
            known = self.design.axes[chosen]
            learned = scales or learn_scales(known, self.log_ratio[chosen], _SEED)
            num_points = len(self.log_ratio)
            question = PlanQuestion(
                candidates=self.design.axes,
                known=known,
                gpu_s=np.ones(num_points),
                scales=learned,
                budget_gpu_s=float(num_points),
                max_points=count,
                seed=len(chosen),
            )
            return np.concatenate([chosen, rank_points(question).rows])

        return choose

    def draw(self, count: int, chosen: Integers) -> Integers:
        """Choose at random."""
        rest = np.setdiff1d(np.arange(len(self.log_ratio)), chosen)
        drawn = np.random.default_rng(_SEED).choice(rest, count, replace=False)
        return np.concatenate([chosen, drawn])

    def lay_grid(self, count: int, chosen: Integers) -> Integers:
        """Choose a grid anew: as many values of every dimension, evenly over those measured."""
        wanted = count + len(chosen)
        per_dim = round(wanted ** (1.0 / self.design.points.shape[1]))
        rows = _grid_rows(self.design.points, per_dim)
        while rows.sum() < wanted:
            per_dim += 1
            rows = _grid_rows(self.design.points, per_dim)
        return np.flatnonzero(rows)


def _grid_rows(points: Integers, per_dim: int) -> Mask:
    is_chosen = np.ones(len(points), dtype=bool)
    for column in points.T:
        values = np.unique(column)
        places = np.linspace(0, len(values) - 1, min(per_dim, len(values))).round()
        is_chosen &= np.isin(column, values[places.astype(np.int64)])
    return is_chosen


def _curve(
    table: Table, choose: Choose, pool: DonorPool | None, steps: tuple[int, ...]
) -> Iterator[tuple[int, float]]:
    chosen = np.empty(0, dtype=np.int64)
    for step in steps:
        if step > len(chosen):
            chosen = choose(step - len(chosen), chosen)
        error_ratio = table.error_ratio(chosen, pool)
        yield len(chosen), error_ratio
        if error_ratio < min(_GOALS_RATIO):
            return


def _report(name: str, curve: Iterator[tuple[int, float]]) -> None:
    started = time.perf_counter()
    found = list(curve)
    points = ", ".join(f"{count:,}: {100 * error:.2f}" for count, error in found)
    needed = {
        f"{100 * goal:.0f} %": next(
            (f"{n:,}" for n, error in found if error <= goal), "not reached"
        )
        for goal in _GOALS_RATIO
    }
    seconds = time.perf_counter() - started
    print(f"{name:24} {needed} in {seconds:.0f} s; MAPE % at points: {points}", flush=True)


def main(data: Path) -> None:
    """Print what every way of choosing needs."""
    with import_sources(data, (AICONFIGURATOR,)) as measurements:
        rows = measurements.read(AICONFIGURATOR, "gemm")
        tables = [t for t in split_into_tables(rows, 1_000) if "quant=" not in t.name]
    series = [table.series for table in tables]
    plain = {
        item.key.device: item
        for item in series
        if item.key.dtype == "bf16" and item.key.framework.startswith("vllm")
    }
    table, sibling = Table(plain[_DEVICE]), Table(plain[_SIBLING])
    pool = DonorLibrary.of(series, _SEED).find(table.series.key)
    drawn = np.random.default_rng(_SEED).choice(len(sibling.log_ratio), _NUM_SCALED, replace=False)
    scales = learn_scales(sibling.design.axes[drawn], sibling.log_ratio[drawn], _SEED)
    print(f"GEMM on {_DEVICE}, {len(table.log_ratio):,} points; sibling {_SIBLING}")
    _report("planned, siblings", _curve(table, table.plan(scales), pool, _STEPS))
    _report("random, siblings", _curve(table, table.draw, pool, _STEPS))
    _report("planned, alone", _curve(table, table.plan(None), None, _STEPS))
    _report("random, alone", _curve(table, table.draw, None, _STEPS))
    _report("grid, alone", _curve(table, table.lay_grid, None, _GRID_STEPS))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT_DATA)
