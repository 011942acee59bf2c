"""Cases of a test, of which `make test` takes a few and `make test-slow` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters; all but the quick ones, which must be there, are slow."""
    found = list(cases)
    assert all(case in found for case in quick), quick
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in found]
