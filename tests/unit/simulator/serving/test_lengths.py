import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import LengthSpec
from foretoken.simulator.grid import Ints
from foretoken.simulator.workload.requests import draw_lengths
from foretoken.simulator.workload.rng import named_stream


def _draw(spec: LengthSpec, num_lengths: int = 50_000) -> Ints:
    return draw_lengths(spec, num_lengths, named_stream(1, "prefill"), "prefill")


def test_fixed_lengths_are_the_mean() -> None:
    assert set(_draw(LengthSpec(mean=7), 10).tolist()) == {7}


def test_uniform_lengths_reach_both_ends_alike() -> None:
    lengths = _draw(LengthSpec(kind="uniform", minimum=5, maximum=7))
    assert np.bincount(lengths)[5:] / len(lengths) == pytest.approx([1 / 3] * 3, rel=0.03)


@pytest.mark.parametrize(("mean", "spread"), [(512, 0.5), (1020, 1.3), (40, 0.8), (512, 0.0)])
def test_lognormal_lengths_have_the_mean_and_spread_asked_for(mean: int, spread: float) -> None:
    lengths = _draw(LengthSpec(kind="lognormal", mean=mean, spread=spread), 400_000)
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.std() == pytest.approx(spread * mean, rel=0.05, abs=1)


def test_zipf_lengths_fall_by_the_power_asked_for() -> None:
    lengths = _draw(LengthSpec(kind="zipf", minimum=10, maximum=13, spread=2.0), 200_000)
    weights = np.array([1, 1 / 4, 1 / 9, 1 / 16])
    assert np.bincount(lengths)[10:] / len(lengths) == pytest.approx(
        weights / weights.sum(), rel=0.03
    )


def test_empirical_lengths_are_those_observed_as_often() -> None:
    lengths = _draw(LengthSpec(kind="empirical", values=(3, 900, 3)))
    counts = dict(zip(*np.unique(lengths, return_counts=True), strict=True))
    assert set(counts) == {3, 900}
    assert counts[3] / len(lengths) == pytest.approx(2 / 3, rel=0.03)


@pytest.mark.parametrize(
    "spec",
    [
        LengthSpec(mean=90, maximum=20),
        LengthSpec(kind="lognormal", mean=15, spread=2.0, maximum=20),
        LengthSpec(kind="empirical", values=(3, 900), maximum=20),
    ],
)
def test_a_maximum_caps_any_kind(spec: LengthSpec) -> None:
    assert _draw(spec).max() == 20


def test_a_minimum_holds_for_the_tail_of_a_lognormal() -> None:
    lengths = _draw(LengthSpec(kind="lognormal", mean=15, spread=2.0, minimum=4))
    assert lengths.min() == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LengthSpec(kind="normal"), r"workload\.prefill\.kind: 'normal' is not one of empirical"),
        (LengthSpec(mean=0), r"workload\.prefill\.mean: must be at least 1"),
        (LengthSpec(mean=2**31), r"workload\.prefill\.maximum: 2147483648 is beyond"),
        (LengthSpec(kind="uniform", minimum=4, maximum=3), r"prefill\.minimum: .* found 4 and 3"),
        (LengthSpec(kind="uniform", minimum=4), r"prefill\.maximum: .* found 4 and 0"),
        (LengthSpec(kind="uniform", minimum=0, maximum=3), r"prefill\.maximum: needs 1 <= min"),
        (LengthSpec(kind="lognormal", spread=1), r"workload\.prefill\.mean: must be at least 1"),
        (LengthSpec(kind="lognormal", mean=5, spread=float("inf")), r"prefill\.spread: must be a"),
        (LengthSpec(kind="zipf", minimum=1), r"prefill\.maximum: needs 1 <= min"),
        (LengthSpec(kind="zipf", maximum=2**30), r"prefill\.maximum: at most 10000000 different"),
        (LengthSpec(kind="zipf", maximum=3, spread=float("inf")), r"prefill\.spread: must be a"),
        (LengthSpec(kind="empirical"), r"prefill\.values: needs at least one"),
    ],
)
def test_lengths_that_mean_nothing_are_refused(spec: LengthSpec, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _draw(spec)
