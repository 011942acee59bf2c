"""Grids of calls that are asked for: what cannot be one is refused, field by field."""

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.correction import CorrectionRequest, Observation, ObservedCall
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.planning import MAX_CANDIDATES, CandidateAxis, PlanRequest
from foretoken.domain.measurements.surface import MAX_SURFACE_POINTS, SurfaceAxis, SurfaceQuery
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.wire.keepalive import MAX_MESSAGE_BYTES

_WIDE = tuple(range(1, 10_001))


@pytest.mark.parametrize(
    ("axes", "field"),
    [
        ({"m": ()}, r"axes\[0\].values"),
        ({"m": (1,), "n": (2, 1)}, r"axes\[1\].values"),
        ({"m": (1, 1)}, r"axes\[0\].values"),
        # More combinations than 64 bits count.
        (dict.fromkeys("abcdef", _WIDE), "axes: 1,000,000,000,000,000,000,000,000 points"),
    ],
    ids=["no value", "descending", "twice", "huge"],
)
def test_axes_that_make_no_grid_are_refused(axes: dict[str, tuple[int, ...]], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        _plan(axes)
    with pytest.raises(InvalidRequestError, match=field):
        _surface(axes)


def test_a_dimension_has_one_axis() -> None:
    axis = SurfaceAxis(dim="m", values=(1,))
    with pytest.raises(InvalidRequestError, match=r"axes\[1\].dim: m has an axis already"):
        SurfaceQuery(device="a30", operator="gemm", dtype=DType.BF16, axes=(axis, axis))


def test_as_many_points_as_fit_are_taken() -> None:
    assert MAX_SURFACE_POINTS == _surface({"m": tuple(range(MAX_SURFACE_POINTS))}).num_points
    (axis,) = _plan({"m": tuple(range(MAX_CANDIDATES))}).axes
    assert MAX_CANDIDATES == len(axis.values)


def test_the_largest_surface_fits_into_a_message() -> None:
    """Six numbers of 8 bytes at every point, and the dimensions of the nearest measured one."""
    num_columns = 6 + max(len(spec.dims) for spec in all_operators().values())
    assert MAX_SURFACE_POINTS * num_columns * 8 < 0.95 * MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("observed_us", "count", "field"),
    [
        (float("inf"), 1.0, "observed_us"),
        (float("nan"), 1.0, "observed_us"),
        (0.0, 1.0, "observed_us"),
        (1.0, -1.0, "calls"),
        (1.0, float("nan"), "calls"),
        (1.0, float("inf"), "calls"),
    ],
)
def test_observations_that_nobody_can_make_are_refused(
    observed_us: float, count: float, field: str
) -> None:
    call = ObservedCall(call=OperatorCall(operator="gemm", dtype=DType.BF16), count=count)
    observation = Observation(name="step", observed_us=observed_us, calls=(call,))
    with pytest.raises(InvalidRequestError, match=rf"observations\[0\].{field}"):
        CorrectionRequest(name="mine", device="a30", observations=(observation,))


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(InvalidRequestError, match="seed"):
        TrainRequest(seed=-1)
    with pytest.raises(InvalidRequestError, match="seed"):
        PlanRequest(device="a30", operator="gemm", seed=-1)


def _plan(axes: dict[str, tuple[int, ...]]) -> PlanRequest:
    candidates = tuple(CandidateAxis(dim=name, values=values) for name, values in axes.items())
    return PlanRequest(device="a30", operator="gemm", axes=candidates)


def _surface(axes: dict[str, tuple[int, ...]]) -> SurfaceQuery:
    named = tuple(SurfaceAxis(dim=name, values=values) for name, values in axes.items())
    return SurfaceQuery(device="a30", operator="gemm", dtype=DType.BF16, axes=named)
