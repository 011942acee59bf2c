"""Compiled loops say what their plain counterparts say, with or without a place for their code."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

from foretoken.predictor.regression.jit import compiled
from foretoken.predictor.regression.kriging import krige, krige_few
from foretoken.predictor.regression.kriging_loop import krige_many

# Of the kind that a compiling model is none of: experts, in other sizes.
_OTHER_QUESTION = """
import numpy as np
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.trainer import train_series
from foretoken.predictor.series import Series, SeriesKey
axes = [(1, 3, 40, 700), (4,), (64,), (64,), (2048, 7168), (512, 2048, 4096)]
points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
key = SeriesKey("moe_experts", "h100_sxm", "", "bf16", "forward", "")
series = Series(key=key, points=points, latency_us=9.0 + points.sum(axis=1) / 50)
model = train_series(series, PredictorConfig(state_folder=""), 0)
asked = series.take(np.repeat(np.arange(len(points)), 3))
model.regressor.predict(asked.design, np.zeros(asked.num_points, dtype=np.int64))
model.floor.floor_us(asked.points)
"""


@pytest.mark.parametrize("num_neighbours", [1, 2, 12])
@pytest.mark.parametrize("num_calls", [1, 16, 37])
@pytest.mark.parametrize("num_axes", [0, 1, 4])
def test_many_calls_are_told_as_few_are(num_neighbours: int, num_calls: int, num_axes: int) -> None:
    """Whether or not their number is one of those that are solved together."""
    rng = np.random.default_rng(0)
    places, values = rng.normal(0.0, 2.0, (60, num_axes)), rng.normal(0.0, 1.0, 60)
    calls = rng.normal(0.0, 5.0, (num_calls, num_axes))
    neighbours = np.array([rng.permutation(60)[:num_neighbours] for _ in range(num_calls)])
    few = krige_few(places, values, calls, neighbours, 0.02)
    many = krige_many(places, values, calls, neighbours, 0.02)
    assert pytest.approx(few[0], abs=1e-9) == many[0]
    assert pytest.approx(few[1], rel=1e-9) == many[1]


def test_other_threads_go_on_while_a_loop_runs() -> None:
    """A large call does not hold up the others, one of which sees that it is under way.

    No thread that holds the interpreter is made to let go of it, so that it is seen nowhere else.
    """
    rng = np.random.default_rng(0)
    places, calls = rng.normal(0.0, 2.0, (60, 4)), rng.normal(0.0, 5.0, (20_000, 4))
    neighbours = np.array([rng.permutation(60)[:12] for _ in range(len(calls))])
    values = np.ascontiguousarray(places[:, 0])
    krige_many(places, values, calls[:16], neighbours[:16], 0.02)
    under_way, seen = [False], [False]

    def look() -> None:
        while not seen[0]:
            seen[0] = under_way[0]
            time.sleep(0)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    try:
        threading.Thread(target=look, daemon=True).start()
        # Again where the machine had no processor for the other thread.
        for _ in range(1_000):
            under_way[0] = True
            krige_many(places, values, calls, neighbours, 0.02)
            under_way[0] = False
            if seen[0]:
                break
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval_s)
    assert seen[0]


@pytest.mark.slow
def test_a_compiled_model_leaves_nothing_to_compile(tmp_path: Path) -> None:
    """A question about other operators and sizes finds all machine code that it needs."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = []
    for code in ("", _OTHER_QUESTION):
        program = f"from foretoken.predictor import compilation as c\nc.compile_loops()\n{code}"
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        found.append({path.relative_to(tmp_path) for path in tmp_path.rglob("*.nbc")})
    assert len(found[0]) > 5
    assert found[0] == found[1]


def test_places_far_apart_have_nothing_in_common() -> None:
    """Where the correlation is too small for a float, a call is estimated by the mean."""
    places, calls = np.array([[0.0], [1e6]]), np.full((20, 1), -1e9)
    mean, variance = krige(places, np.array([1.0, 3.0]), calls, np.tile([0, 1], (20, 1)), 0.1)
    assert pytest.approx(np.full(20, 2.0)) == mean
    assert pytest.approx(np.full(20, 1.1 + 1.1 / 2.0)) == variance


def test_without_a_place_for_machine_code_loops_are_compiled_all_the_same() -> None:
    """A function that no file holds has no place next to its source."""

    def double(value: float) -> float:
        return 2.0 * value

    homeless: Callable[[float], float] = FunctionType(
        double.__code__.replace(co_filename="/nowhere/loop.py"), {}
    )
    assert 6.0 == compiled(homeless)(3.0)
