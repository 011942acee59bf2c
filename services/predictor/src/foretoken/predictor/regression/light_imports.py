"""Parts of large libraries without the rest: a third of a second less where models are trained.

Packages import all that they offer: scipy's for a search of neighbours or a fit without negative
numbers its statistics and transforms, LightGBM pandas. Where a release of scipy has a part
elsewhere the package is imported as its users do.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from foretoken.jobs.process_setup import is_of_ours

if TYPE_CHECKING:
    from types import ModuleType

    from foretoken.predictor.features import Matrix
    from foretoken.predictor.roofline import FloatColumn

TREE_MODULE = "scipy.spatial._ckdtree"
FIT_MODULE = "scipy.optimize._slsqplib"
# What the compiled fit says where its rounds did not do.
_TOO_MANY_ROUNDS = 3
_PANDAS = "pandas"
# Threads that come while one loads wait for it: half a module is in `sys.modules` until then.
_LOADING = Lock()


def load_lightgbm() -> Any:
    """Return LightGBM; a process of ours, which gives it arrays alone, spares it pandas."""
    with _LOADING:
        return _import_lightgbm()


@cache
def _import_lightgbm() -> Any:
    if not is_of_ours() or _PANDAS in sys.modules:
        return import_module("lightgbm")
    # What is None there cannot be imported, which LightGBM is prepared for.
    sys.modules[_PANDAS] = None  # type: ignore[assignment]
    try:
        return import_module("lightgbm")
    finally:
        del sys.modules[_PANDAS]


def nearest_tree(places: Matrix, **settings: Any) -> Any:
    """Return scipy's `cKDTree` of places."""
    try:
        tree = _load_part(TREE_MODULE).cKDTree
    except (ImportError, AttributeError):
        tree = import_module("scipy.spatial").cKDTree
    return tree(places, **settings)


def fit_not_negative(rows: Matrix, wanted: FloatColumn, max_rounds: int = 0) -> FloatColumn:
    """Return what scipy's `nnls` does: factors of the columns, none negative, nearest to a sum.

    Raises:
        RuntimeError: not found in so many rounds (0: three for each column).

    """
    max_rounds = max_rounds or 3 * rows.shape[1]
    rows, wanted = (np.ascontiguousarray(np.asarray_chkfinite(a), float) for a in (rows, wanted))
    try:
        solution, _, problem = _load_part(FIT_MODULE).nnls(rows, wanted, max_rounds)
    except (ImportError, AttributeError, TypeError):  # Another release has or calls it otherwise.
        solution, _ = import_module("scipy.optimize").nnls(rows, wanted, maxiter=max_rounds)
        return np.asarray(solution)
    if problem == _TOO_MANY_ROUNDS:
        raise RuntimeError("no factors were found in time")
    return np.asarray(solution)


def _load_part(name: str) -> ModuleType:
    """Return a compiled module of scipy; its package, if it comes later, takes the same one.

    Raises:
        ImportError: there is no such module, or it needs its package.

    """
    with _LOADING:
        return _import_part(name)


@cache
def _import_part(name: str) -> ModuleType:
    package, _, _ = name.rpartition(".")
    if package in sys.modules:
        return import_module(name)
    folders = [f"{path}/{package.partition('.')[2]}" for path in import_module("scipy").__path__]
    spec = PathFinder.find_spec(name, folders)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
