"""The members of a series' model: the law of work, kriging, trees, and their mixture."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import all_operators, find_operator
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.intervals.holdout import SplitKind
from foretoken.predictor.regression.cross_validation import CrossValidation, Part, Unseen
from foretoken.predictor.regression.kriging import Kriging, Scales, learn_scales
from foretoken.predictor.regression.member import STEPS, MemberFitter
from foretoken.predictor.regression.mixture import learn_shares
from foretoken.predictor.regression.regime import WorkLaw, fit_work_law
from foretoken.predictor.regression.series_regressor import SeriesRegressor
from foretoken.predictor.regression.trees import TreeRows, Trees
from foretoken.predictor.roofline import Target

_Floats = npt.NDArray[np.float64]

CONFIG = PredictorConfig(state_folder="")
SPEC = find_operator("gemm")
TARGET = Target(device=find_device("a100_sxm_80"), dtype=DType.FP16)


def gemms(num_rows: int, seed: int = 0, smallest: int = 4, largest: int = 12) -> Design:
    """Return random distinct GEMMs of powers of two and their neighbours."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(smallest, largest + 1, (4 * num_rows, 3))
    points = np.unique(2**exponents, axis=0)
    rows = rng.permutation(points)[:num_rows]
    return build_design(SPEC, dict(zip(SPEC.dim_names, rows.T, strict=True)), TARGET)


def sum_law_log(design: Design) -> _Floats:
    """Return the log ratio of a device whose compute and memory time add up."""
    compute_us, memory_us = design.work[:, 2], design.work[:, 3]
    return np.log((7.0 + 1.6 * compute_us + 1.2 * memory_us) / design.base_us)


def mape(estimate_log: _Floats, truth_log: _Floats) -> float:
    return float(np.abs(np.expm1(estimate_log - truth_log)).mean())


def test_the_law_finds_a_sum_of_parts_and_goes_on_beyond_the_data() -> None:
    known, beyond = gemms(200, largest=11), gemms(60, smallest=12, largest=14)
    law = fit_work_law(known, sum_law_log(known))
    assert mape(law.log_ratio(known), sum_law_log(known)) < 0.005
    assert mape(law.log_ratio(beyond), sum_law_log(beyond)) < 0.02


def test_a_constant_share_of_the_base_latency_is_found_exactly() -> None:
    design = gemms(100)
    law = fit_work_law(design, np.full(design.num_rows, np.log(1.5)))
    assert law.log_ratio(design) == pytest.approx(np.log(1.5), abs=1e-6)


def test_few_points_make_no_law() -> None:
    design = gemms(11)
    law = fit_work_law(design, sum_law_log(design))
    assert law.log_ratio(design).tolist() == [0.0] * design.num_rows


def test_the_law_never_falls_when_work_grows() -> None:
    design = gemms(100)
    law = fit_work_law(design, sum_law_log(design))
    more = dataclasses.replace(design, work=design.work * 1.1)
    assert (law.log_ratio(more) >= law.log_ratio(design)).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 1_000), dim=st.sampled_from(SPEC.dim_names))
def test_the_law_never_falls_when_a_size_grows_whatever_was_measured(seed: int, dim: str) -> None:
    """No coefficient is negative, and no part of the work shrinks with a size."""
    known = gemms(60, seed)
    noise_log = np.random.default_rng(seed).normal(0.0, 0.5, known.num_rows)
    law = fit_work_law(known, noise_log)
    assert (law.coefficients >= 0.0).all()
    columns = dict(zip(SPEC.dim_names, known.points.T, strict=True))
    larger = build_design(SPEC, {**columns, dim: columns[dim] + 1 + seed}, TARGET)
    before_us = known.base_us * np.exp(law.log_ratio(known))
    after_us = larger.base_us * np.exp(law.log_ratio(larger))
    assert (after_us >= before_us * (1.0 - 1e-9)).all()


def test_a_law_is_never_near_nothing() -> None:
    design = gemms(5)
    law = WorkLaw(np.zeros(design.work.shape[1]), 1.0)
    assert np.exp(law.log_ratio(design)) == pytest.approx(0.05)


@pytest.mark.parametrize("name", sorted(all_operators()))
def test_no_operator_has_negative_or_infinite_work_or_axes(name: str) -> None:
    spec = find_operator(name)
    if spec.is_collective:
        pytest.skip("collectives are answered by curves")
    is_quick = True
    dims = list(spec.sweep(is_quick)) or [{dim.name: dim.minimum for dim in spec.dims}]
    columns = {name: np.array([row[name] for row in dims]) for name in spec.dim_names}
    design = build_design(spec, columns, TARGET)
    for matrix in (design.work, design.axes, design.features):
        assert np.isfinite(matrix).all()
    assert (design.work >= 0.0).all()
    assert (design.axes >= 0.0).all()


def test_kriging_gives_back_smooth_values_between_points() -> None:
    axes = np.stack(np.meshgrid(np.arange(8.0), np.arange(8.0)), axis=-1).reshape(-1, 2)

    def field(places: _Floats) -> _Floats:
        return np.asarray(np.sin(places[:, 0] / 2.0) + 0.1 * places[:, 1])

    kriging = Kriging(axes, field(axes), learn_scales(axes, field(axes), seed=0))
    asked = np.array([[2.5, 3.5], [5.5, 1.5], [3.0, 6.5]])
    mean, _ = kriging.predict(asked)
    assert mean == pytest.approx(field(asked), abs=0.04)


def test_kriging_doubts_what_is_far_from_points() -> None:
    axes = np.arange(10.0)[:, None]
    kriging = Kriging(axes, np.sin(axes[:, 0]), Scales(np.zeros(1), -6.0, 0.3))
    _, deviation_log = kriging.predict(np.array([[4.01], [4.5], [12.0], [20.0]]))
    assert (np.diff(deviation_log) > 0.0).all()


def test_an_axis_without_influence_gets_a_longer_length() -> None:
    rng = np.random.default_rng(0)
    axes = rng.uniform(0.0, 6.0, (300, 2))
    scales = learn_scales(axes, np.sin(2.0 * axes[:, 0]), seed=0)
    assert scales.lengths_log[1] > scales.lengths_log[0] + 1.0


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_kriging_works_on_the_fewest_points(num_rows: int) -> None:
    axes = np.arange(float(num_rows))[:, None]
    kriging = Kriging(axes, np.full(num_rows, 0.4), learn_scales(axes, np.full(num_rows, 0.4), 0))
    mean, deviation_log = kriging.predict(np.array([[0.5], [9.0]]))
    assert mean == pytest.approx(0.4)
    assert (deviation_log > 0.0).all()


def grow(features: _Floats, values: _Floats) -> Trees:
    rows = TreeRows(features, CONFIG, is_linear=True)
    return rows.grow(np.arange(len(features)), values, CONFIG.booster, seed=0)


def test_trees_over_a_part_see_nothing_of_the_rest() -> None:
    rng = np.random.default_rng(0)
    features = np.round(rng.uniform(0.0, 9.0, (400, 3)))
    rows, part = TreeRows(features, CONFIG, is_linear=True), np.arange(0, 400, 2)
    values = np.sin(features[:, 0])
    trees = rows.grow(part, values[part], CONFIG.booster, seed=0)
    alone = grow(features[part], values[part])
    assert trees.predict(features).tolist() == alone.predict(features).tolist()


def test_trees_stay_within_what_they_have_seen() -> None:
    rng = np.random.default_rng(0)
    features = rng.uniform(0.0, 1.0, (200, 3))
    trees = grow(features, features[:, 0] * 2.0)
    far = trees.predict(features * 100.0)
    assert trees.low <= far.min()
    assert far.max() <= trees.high


def test_settled_trees_answer_as_before() -> None:
    rng = np.random.default_rng(0)
    features = rng.uniform(0.0, 1.0, (200, 3))
    trees = grow(features, np.sin(9.0 * features[:, 0]))
    assert trees.settle().predict(features) == pytest.approx(trees.predict(features), abs=1e-3)


def unseen(answers: _Floats, tier: Tier) -> Unseen:
    """Return points of which the truth is 0, each left out by itself."""
    ones = np.ones(len(answers))
    codes = np.zeros(len(answers), dtype=np.int64)
    return Unseen(
        kind=SplitKind.RANDOM,
        fold=0,
        points=codes[:, None],
        answers=answers,
        spread_log=ones,
        truth_log=0.0 * ones,
        base_us=ones,
        octaves=0.0 * ones,
        tiers=codes + tier,
        group=np.arange(len(answers)),
    )


def erring(*deviations_log: float) -> _Floats:
    """Return answers of members that err by so much."""
    return np.random.default_rng(0).normal(0.0, [deviations_log], (500, len(deviations_log)))


def test_the_member_that_errs_less_gets_the_larger_share() -> None:
    shares = learn_shares([unseen(erring(0.01, 0.1), Tier.GRID)], 2)
    assert shares[Tier.GRID, 0] > 0.8
    assert shares.sum(axis=1) == pytest.approx(1.0)


def test_every_tier_has_shares_of_its_own() -> None:
    answers = erring(0.01, 0.1)
    parts = [unseen(answers, Tier.GRID), unseen(answers[:, ::-1], Tier.NEW_CONFIGURATION)]
    shares = learn_shares(parts, 2)
    assert shares[Tier.GAP].tolist() == shares[Tier.GRID].tolist()
    assert shares[Tier.NEW_CONFIGURATION, 1] > 0.8
    assert shares[Tier.FAR_CONFIGURATION].tolist() == shares[Tier.NEW_CONFIGURATION].tolist()


def test_without_points_left_out_shares_are_equal_but_for_the_steps() -> None:
    assert (learn_shares([], 2) == 0.5).all()
    assert learn_shares([], 4)[Tier.GRID] == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3])


def test_steps_count_where_they_are_clearly_better() -> None:
    shares = learn_shares([unseen(erring(0.1, 0.1, 0.01), Tier.BEYOND)], 3)
    assert shares[Tier.BEYOND, STEPS] > 0.8


def test_steps_that_are_better_in_one_group_only_do_not_count() -> None:
    """Of two groups the members are exact in one, where steps err, and off in the other."""
    answers = np.zeros((500, 3))
    answers[:250, STEPS], answers[250:, :STEPS] = 0.1, 0.11
    halves = dataclasses.replace(unseen(answers, Tier.BEYOND), group=np.repeat(np.arange(2), 250))
    assert learn_shares([halves], 3)[Tier.BEYOND, STEPS] == 0.0


@pytest.mark.parametrize(
    ("answer_log", "share"), [(1.8, 0.5), (2.0, 0.5), (2.2, 1.0)], ids=["less", "just", "more"]
)
def test_equal_shares_are_left_for_a_gain_of_more_than_a_hundredth(
    answer_log: float, share: float
) -> None:
    """99 points err by 1 under all shares; at the last one only the second member errs."""
    answers = np.ones((100, 2))
    answers[-1] = 0.0, answer_log
    assert share == learn_shares([unseen(answers, Tier.GRID)], 2)[Tier.GRID, 0]


def test_points_left_out_are_asked_of_models_that_do_not_know_them() -> None:
    design = gemms(120)
    row_of = {tuple(point): row for row, point in enumerate(design.points.tolist())}
    clashes: list[tuple[int, ...]] = []

    def ask(known: Part, asked: Part, _tiers: npt.NDArray[np.int64]) -> tuple[_Floats, _Floats]:
        seen = {tuple(point) for point in known.design.points.tolist()}
        clashes.extend(p for p in map(tuple, asked.design.points.tolist()) if p in seen)
        rows = [row_of[tuple(point)] for point in asked.design.points.tolist()]
        assert rows == asked.rows.tolist()
        return np.array(rows, dtype=np.float64)[:, None], np.ones(len(rows))

    truth_log = np.arange(design.num_rows, dtype=np.float64)
    parts = list(CrossValidation(SPEC, design, truth_log, seed=0).leave_out(ask))
    assert clashes == []
    assert len(parts) > 2
    assert all(part.answers[:, 0].tolist() == part.truth_log.tolist() for part in parts)


def train(design: Design, truth_log: _Floats) -> SeriesRegressor:
    fitter = MemberFitter(CONFIG, 0, design, truth_log, np.arange(design.num_rows))
    members = fitter.fit(has_steps=True).settle()
    return SeriesRegressor(members, np.full((len(Tier), 3), 1.0 / 3.0))


def test_a_stored_regressor_answers_as_before() -> None:
    design = gemms(150)
    regressor = train(design, sum_law_log(design))
    again = SeriesRegressor.from_state(regressor.to_state(), design, sum_law_log(design))
    tiers = np.zeros(design.num_rows, dtype=np.int64)
    before, after = regressor.predict(design, tiers), again.predict(design, tiers)
    assert before.log_ratio.tolist() == after.log_ratio.tolist()
    assert before.spread_log.tolist() == after.spread_log.tolist()


def test_equal_trainings_give_equal_states() -> None:
    design = gemms(150)
    first, second = (train(design, sum_law_log(design)).to_state() for _ in range(2))
    assert first.numbers == second.numbers
    assert {name: array.tobytes() for name, array in first.arrays.items()} == {
        name: array.tobytes() for name, array in second.arrays.items()
    }


def test_kriging_tells_a_measured_point_from_those_around_it() -> None:
    axes = np.arange(20.0)[:, None]
    values = np.where(axes[:, 0] == 10.0, 0.5, 0.1)
    mean, _ = Kriging(axes, values, Scales(np.ones(1), -6.0, 0.3)).predict(axes[10:11])
    assert mean == pytest.approx(0.1, abs=0.05)
