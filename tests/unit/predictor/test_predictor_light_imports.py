"""Parts of libraries are those that the whole libraries have, at a fraction of their imports."""

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy.optimize import nnls  # type: ignore[import-untyped]
from scipy.spatial import cKDTree  # type: ignore[import-untyped]

from foretoken.predictor.regression.light_imports import fit_not_negative, nearest_tree

# Trains a model as a worker does, then says which of some packages it has.
_TRAIN = """
import json, sys
from foretoken.jobs.process_setup import take_as_ours
if {is_ours}:
    take_as_ours()
from foretoken.predictor.compilation import compile_loops
compile_loops()
packages = ("pandas", "scipy.linalg", "scipy.optimize", "scipy.spatial", "scipy.special")
print(json.dumps([name for name in packages if name in sys.modules]))
import scipy.optimize, scipy.spatial, pandas
from foretoken.predictor.regression.light_imports import nearest_tree
assert isinstance(nearest_tree([[0.0], [1.0]]), scipy.spatial.cKDTree)
assert scipy.optimize.nnls([[1.0]], [2.0])[0] == [2.0]
"""
# Where scipy's parts are not where they were: what is None cannot be imported.
_ELSEWHERE = """
import sys
import numpy as np
import scipy.optimize, scipy.spatial
from foretoken.predictor.regression import light_imports
sys.modules[light_imports.FIT_MODULE] = sys.modules[light_imports.TREE_MODULE] = None
assert isinstance(light_imports.nearest_tree([[0.0], [1.0]]), scipy.spatial.cKDTree)
print(light_imports.fit_not_negative(np.array([[2.0]]), np.array([3.0])))
"""


@pytest.mark.parametrize(("is_ours", "loaded"), [(True, []), (False, ["pandas"])])
def test_a_process_of_ours_trains_without_packages_it_does_not_use(
    is_ours: bool, loaded: list[str]
) -> None:
    """One that is not keeps LightGBM as its owner may want it; packages work when they come."""
    code = _TRAIN.format(is_ours=is_ours)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded == json.loads(done.stdout)


def test_factors_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for num_columns in range(1, 12):
        rows = rng.normal(size=(40, num_columns)) ** 2
        wanted = rng.normal(size=40)
        own = rows.copy(), wanted.copy()
        expected, _ = nnls(rows, wanted)
        np.testing.assert_array_equal(expected, fit_not_negative(rows, wanted))
        np.testing.assert_array_equal(own[0], rows)
        np.testing.assert_array_equal(own[1], wanted)


def test_packages_answer_where_their_parts_are_elsewhere() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1.5]\n"


def test_factors_are_refused_where_a_number_is_none_or_there_is_no_time() -> None:
    with pytest.raises(ValueError, match="infs or NaNs"):
        fit_not_negative(np.array([[np.nan]]), np.ones(1))
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(30, 10)) ** 2
    with pytest.raises(RuntimeError, match="in time"):
        fit_not_negative(rows, rows.sum(axis=1), 1)


def test_neighbours_are_those_of_scipy() -> None:
    places = np.random.default_rng(0).normal(size=(100, 3))
    expected = cKDTree(places, leafsize=32).query(places + 0.1, k=3)[1]
    np.testing.assert_array_equal(
        expected, nearest_tree(places, leafsize=32).query(places + 0.1, k=3)[1]
    )
