"""Laws of the error of a difference: what is common does not count, the rest adds up as squares."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from foretoken.simulator.grid import Floats
from foretoken.simulator.search.training.ties import difference_errors

_ERRORS = arrays.arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.floats(0, 1e6)
)


def _common(errors: Floats) -> Floats:
    return difference_errors(errors, np.ones_like(errors))


@given(errors=_ERRORS)
def test_the_first_does_not_differ_from_itself(errors: Floats) -> None:
    assert 0 == _common(errors)[0]


@given(errors=_ERRORS, shared=st.floats(0, 1e6))
def test_an_error_that_all_share_changes_nothing(errors: Floats, shared: float) -> None:
    """A family more, as wrong for each."""
    more = np.vstack([errors, np.full(errors.shape[1], shared)])
    np.testing.assert_array_equal(_common(errors), _common(more))


@given(errors=_ERRORS, correlation=st.floats(0, 1))
def test_what_is_less_common_is_never_surer(errors: Floats, correlation: float) -> None:
    """The variance is that of a difference of two errors with a correlation."""
    found = difference_errors(errors, np.full_like(errors, correlation))
    assert (_common(errors) <= found * (1 + 1e-9)).all()
    first = errors[:, :1]
    variance = (errors**2 + first**2 - 2 * correlation * errors * first).sum(axis=0)
    np.testing.assert_allclose(found**2, variance, atol=1e-3)


@given(errors=_ERRORS)
def test_families_err_on_their_own(errors: Floats) -> None:
    """The error of all is no less than that of each, and no more than all of them in a line."""
    alone = np.array([_common(row[None, :]) for row in errors])
    together = _common(errors)
    assert (alone.max(axis=0) <= together * (1 + 1e-9)).all()
    assert (together <= alone.sum(axis=0) * (1 + 1e-9)).all()


@given(errors=_ERRORS, scale=st.floats(0.1, 10))
def test_errors_are_in_the_unit_of_what_is_compared(errors: Floats, scale: float) -> None:
    np.testing.assert_allclose(_common(scale * errors), scale * _common(errors), atol=1e-6)
