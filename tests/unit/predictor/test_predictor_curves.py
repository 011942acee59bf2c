"""Curves of collectives: what a law of the ring says, and what each group adds to it."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.regression.curves import (
    CurveRegressor,
    fit_curve_regressor,
    has_curves,
    pool_violators,
)
from foretoken.predictor.roofline import Target

SIZES = 2 ** np.arange(9, 30)
START_US, STEP_US, RATIO = 6.0, 1.5, 1.8


def design_of(
    sizes: npt.NDArray[np.int64], *groups: tuple[int, int], operator: str = "all_reduce"
) -> Design:
    """Return calls of all sizes in all groups of (devices per node, nodes)."""
    points = np.array([(size, *group) for group in groups for size in sizes])
    names = ("message_bytes", "devices_per_node", "num_nodes")
    columns = {name: points[:, place] for place, name in enumerate(names)}
    topology = find_topology("a100_dgx")
    target = Target(device=find_device("a100_sxm_80"), dtype=DType.FP16, topology=topology)
    return build_design(find_operator(operator), columns, target)


def ring_us(design: Design) -> npt.NDArray[np.float64]:
    """Return what a ring takes: a start, its steps, and its bytes at a share of the rate."""
    num_ranks = design.points[:, 1] * design.points[:, 2]
    return np.asarray(START_US + STEP_US * (num_ranks - 1) + RATIO * design.roofline_us)


def train(design: Design, latency_us: npt.NDArray[np.float64]) -> CurveRegressor:
    return fit_curve_regressor(design, np.log(latency_us / design.base_us))


def predict_us(regressor: CurveRegressor, design: Design) -> npt.NDArray[np.float64]:
    prediction = regressor.predict(design, np.zeros(design.num_rows, dtype=np.int64))
    return np.asarray(design.base_us * np.exp(prediction.log_ratio))


@pytest.mark.parametrize("left_out", [(2, 1), (4, 1), (8, 1)])
def test_a_group_that_was_not_measured_follows_the_ring(left_out: tuple[int, int]) -> None:
    groups = [group for group in ((2, 1), (4, 1), (8, 1)) if group != left_out]
    known, asked = design_of(SIZES, *groups), design_of(SIZES, left_out)
    estimate_us = predict_us(train(known, ring_us(known)), asked)
    assert estimate_us == pytest.approx(ring_us(asked), rel=0.03)


def test_a_bend_that_no_law_knows_is_kept() -> None:
    """A protocol that is twice as slow over two octaves shows between the measured sizes, too."""
    known = design_of(SIZES[::2], (8, 1))
    asked = design_of(SIZES[13:16:2], (8, 1))
    slower = {int(size): 1.6 for size in SIZES[12:17]}

    def bent_us(design: Design) -> npt.NDArray[np.float64]:
        return ring_us(design) * [slower.get(int(size), 1.0) for size in design.points[:, 0]]

    estimate_us = predict_us(train(known, bent_us(known)), asked)
    assert estimate_us == pytest.approx(bent_us(asked), rel=0.1)


def test_noise_of_many_sizes_is_smoothed_away() -> None:
    rng = np.random.default_rng(0)
    sizes = np.unique(np.exp2(rng.uniform(20, 26, 3000)).astype(np.int64))
    known = design_of(sizes, (4, 1))
    regressor = train(known, ring_us(known) * np.exp(rng.normal(0.0, 0.05, len(sizes))))
    assert predict_us(regressor, known) == pytest.approx(ring_us(known), rel=0.03)


def test_beyond_the_largest_size_the_rate_goes_on() -> None:
    known, asked = design_of(SIZES[:-3], (8, 1)), design_of(SIZES[-3:], (8, 1))
    assert predict_us(train(known, ring_us(known)), asked) == pytest.approx(
        ring_us(asked), rel=0.03
    )


def test_latency_never_falls_as_messages_grow() -> None:
    rng = np.random.default_rng(1)
    known = design_of(SIZES, (2, 1), (8, 1))
    regressor = train(known, ring_us(known) * np.exp(rng.normal(0.0, 0.3, known.num_rows)))
    every_size = np.unique(np.exp2(np.linspace(0, 36, 2000)).astype(np.int64))
    for group in ((2, 1), (4, 1), (8, 1)):
        asked = design_of(every_size, group)
        steps_log = np.diff(np.log(predict_us(regressor, asked)))
        assert steps_log.min() >= -1e-12


def test_doubt_grows_away_from_sizes_and_groups_that_were_measured() -> None:
    known = design_of(SIZES, (2, 1), (4, 1))
    regressor = train(known, ring_us(known))
    asked = design_of(np.array([2**20, 2**33]), (4, 1), (8, 1), (8, 4))
    spread_log = regressor.predict(asked, np.zeros(6, dtype=np.int64)).spread_log
    measured, beyond, other_group, other_group_beyond, other_link, other_link_beyond = spread_log
    assert measured < beyond
    assert measured < other_group < other_group_beyond
    assert other_group < other_link == pytest.approx(other_link_beyond, rel=0.01)


def test_links_that_were_not_measured_take_half_the_efficiency_of_the_others() -> None:
    known = design_of(SIZES, (4, 1))
    regressor = train(known, 4.0 * known.base_us)
    asked = design_of(SIZES, (4, 2))
    assert predict_us(regressor, asked) == pytest.approx(2.0 * asked.base_us, rel=1e-6)


def test_calls_are_answered_alike_alone_and_together() -> None:
    known = design_of(SIZES, (2, 1), (8, 1))
    regressor = train(known, ring_us(known))
    asked = design_of(np.array([1000, 77777, 2**31]), (2, 1), (4, 1), (8, 1))
    alone = [predict_us(regressor, asked.take(np.array([row])))[0] for row in range(asked.num_rows)]
    assert predict_us(regressor, asked).tolist() == alone


def test_a_stored_model_answers_like_the_one_it_was_taken_from() -> None:
    known, asked = design_of(SIZES, (2, 1), (8, 1)), design_of(SIZES, (4, 1))
    regressor = train(known, ring_us(known))
    again = CurveRegressor.from_state(regressor.to_state())
    assert predict_us(again, asked).tolist() == predict_us(regressor, asked).tolist()


def test_equal_measurements_make_equal_states() -> None:
    known = design_of(SIZES, (2, 1), (8, 1))
    first, second = (train(known, ring_us(known)).to_state() for _ in range(2))
    assert {name: array.tobytes() for name, array in first.arrays.items()} == {
        name: array.tobytes() for name, array in second.arrays.items()
    }
    assert first.numbers == second.numbers


def test_only_collectives_over_groups_have_curves() -> None:
    named = {name: has_curves(find_operator(name)) for name in ("all_gather", "gemm", "send_recv")}
    assert named == {"all_gather": True, "gemm": False, "send_recv": True}


@given(st.lists(st.floats(-10.0, 10.0), max_size=30))
def test_neighbours_that_fall_are_pooled_as_scipy_does(values: list[float]) -> None:
    found = pool_violators(np.array(values))

    expected = isotonic_regression(values).x if values else []
    assert pytest.approx(list(expected), abs=1e-12) == found.tolist()
    assert (np.diff(found) >= 0.0).all()
