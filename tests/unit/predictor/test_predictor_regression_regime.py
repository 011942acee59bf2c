"""Laws of work by regime: one law for one kernel, several where kernels change."""

import numpy as np
import numpy.typing as npt
import pytest

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.regression.regime import Regimes, fit_regimes
from foretoken.predictor.roofline import Target

SPEC = find_operator("gemm")
TARGET = Target(device=find_device("a100_sxm_80"), dtype=DType.FP16)
# The k from which the second of two kernels takes over.
CHANGE = 600


def gemms(num_rows: int) -> Design:
    rng = np.random.default_rng(0)
    points = np.unique(rng.integers(64, 4096, (num_rows, 3)), axis=0)
    return build_design(SPEC, dict(zip(SPEC.dim_names, points.T, strict=True)), TARGET)


def two_kernels_log(design: Design) -> npt.NDArray[np.float64]:
    """Return the log ratio of a device that takes three times the base latency for small k."""
    return np.asarray(np.where(design.points[:, 2] < CHANGE, np.log(3.0), np.log(1.2)))


def test_two_kernels_get_a_law_each() -> None:
    design = gemms(2_000)
    regimes = fit_regimes(design, two_kernels_log(design))
    assert regimes.log_ratio(design) == pytest.approx(two_kernels_log(design), abs=1e-3)


def test_one_kernel_keeps_one_law() -> None:
    design = gemms(2_000)
    regimes = fit_regimes(design, np.full(design.num_rows, np.log(1.4)))
    assert (regimes.feature == -1).all()


def test_few_points_are_not_split() -> None:
    design = gemms(300)
    assert (fit_regimes(design, two_kernels_log(design)).feature == -1).all()


def test_stored_laws_answer_as_before() -> None:
    design = gemms(2_000)
    regimes = fit_regimes(design, two_kernels_log(design))
    again = Regimes.from_arrays(regimes.to_arrays())
    assert regimes.log_ratio(design).tolist() == again.log_ratio(design).tolist()


def test_a_call_is_answered_alone_as_in_company() -> None:
    design = gemms(1_000)
    regimes = fit_regimes(design, two_kernels_log(design))
    alone = [regimes.log_ratio(design.take(np.array([row])))[0] for row in range(20)]
    assert regimes.log_ratio(design)[:20].tolist() == alone
