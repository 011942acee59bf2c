"""Ties of strategies: decided by the error of their difference, not by both intervals."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.measurements.estimate import (
    LatencyQuery,
    LatencyReply,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.closed_form import Setting, answer_in_closed_form
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.search.training.step_time import StepTimer, StepTimes
from foretoken.simulator.search.training.ties import (
    CORRELATIONS,
    find_ties,
    time_errors,
)
from foretoken.simulator.steps.error_parts import (
    ERROR_FAMILIES,
    bound_cases,
    families_of,
    price_cases,
)
from foretoken.simulator.steps.strategies import Strategies

_PRODUCTS = ERROR_FAMILIES.index("matrix products")
_IN_NODE = ERROR_FAMILIES.index("collectives in a node")


class _Doubtful:
    """The roofline, unsure of some families alone, by a ratio each; `at_bound` they take that."""

    def __init__(
        self,
        error_ratios: Mapping[int, float],
        provenance: Provenance = Provenance.INTERPOLATED,
        *,
        at_bound: bool = False,
    ) -> None:
        self._ratios, self._at_bound = error_ratios, at_bound
        self._provenance = provenance
        self._roofline = RooflinePredictor()
        self.num_queries = 0

    def list_models(self) -> tuple[ModelVersion, ...]:
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.num_queries += 1
        reply: LatencyReply = self._roofline.predict(query)
        tables = []
        for table, answer in zip(query.tables, reply.tables, strict=True):
            estimate = np.asarray(answer.latency_us)
            ratios = np.array([self._ratios.get(int(row), 0.0) for row in families_of(table)])
            high = estimate * (1 + ratios)
            first = high if self._at_bound else estimate
            tables.append(
                replace(
                    answer,
                    latency_us=first,
                    low_us=estimate * (1 - ratios),
                    high_us=high,
                    provenance=np.full(table.num_rows, self._provenance.value),
                )
            )
        return replace(reply, tables=tuple(tables))


def _request(device: str = "a100_sxm_80") -> TrainingSearchRequest:
    """Two strategies that compute the same: the sums of tp are hidden behind it, or are not."""
    return TrainingSearchRequest(
        scenario=build_scenario(
            ParallelLayout(dp=8),
            model=find_model("tiny-llama"),
            device=device,
            sequence_length=512,
            global_batch_size=32,
        ),
        space=TrainingSpace(
            tp=(2,),
            pp=(1,),
            cp=(1,),
            virtual_stages=(1,),
            micro_batch_sizes=(4,),
            recompute=("none",),
            weight_parallel=("",),
            sequence_parallel=(False,),
            zero_stages=(0,),
            overlaps=("none", "all"),
        ),
        num_finalists=0,
    )


def _strategies(request: TrainingSearchRequest) -> Strategies:
    space = resolve_space(request)
    return space.piece(0, space.num_points)


def _two() -> Strategies:
    """Return ZeRO 2 and 3, which exchanges parameters once more: nothing hides it."""
    request = _request()
    space = replace(request.space, tp=(1,), zero_stages=(2, 3), overlaps=("none",))
    return _strategies(replace(request, space=space))


def _ties_of_two(error_ratios: Mapping[int, float], provenance: Provenance) -> list[bool]:
    """Return who ties of two that compute the same."""
    strategies, predictor = _two(), _Doubtful(error_ratios, provenance)
    times = StepTimer(strategies.source.scenario, predictor).time(strategies)
    first, second = times.step_us
    assert first < second
    timed = time_errors(_answers(strategies, times), predictor)
    # The scale of values is of no matter.
    found: list[bool] = find_ties(
        7 * timed.of_steps.up_us, 7 * times.step_us, timed.correlation
    ).tolist()
    return found


def _answers(strategies: Strategies, times: StepTimes) -> Answers:
    nothing = np.zeros(len(strategies))
    return Answers(
        strategies=strategies,
        step_us=times.step_us,
        low_us=times.low_us,
        high_us=times.high_us,
        bubble_ratio=nothing,
        exposed_ratio=nothing,
        mfu_ratio=nothing,
        shape=times.shape,
        reserved_bytes=nothing,
        margin_bytes=nothing,
    )


def test_an_error_of_what_both_run_alike_ties_nobody() -> None:
    """Products may take twice as long: both steps with them, and the order stays."""
    found = answer_in_closed_form(
        _request(), Setting(predictor=_Doubtful({_PRODUCTS: 1.0})), lambda _: None
    )
    assert found.ranked is not None
    winner, other = found.ranked.step_us
    # The interval of the winner holds the other: that alone would be a tie.
    assert winner < other < found.ranked.high_us[0]
    assert [] == found.ties.tolist()


def test_a_search_finds_what_an_error_of_the_difference_ties() -> None:
    """Here it is of the sums of tp, which the winner hides."""
    found = [
        answer_in_closed_form(
            _request(), Setting(predictor=_Doubtful({_IN_NODE: ratio})), lambda _: None
        )
        for ratio in (0.0, 2.0)
    ]
    assert [[], [1]] == [form.ties.tolist() for form in found]


@pytest.mark.parametrize("products", [0.0, 0.5])
@pytest.mark.parametrize("provenance", list(Provenance))
def test_a_difference_in_collectives_alone_ties_by_their_error_alone(
    products: float, provenance: Provenance
) -> None:
    """However unsure the products are, which both run.

    Collectives of a and b µs with an error of r: messages of other sizes have a part c of it in
    common, more where it is estimated from other links, so the difference b - a errs by
    r sqrt(a^2 + b^2 - 2 c a b).
    """
    strategies = _two()
    estimate, doubled = (
        StepTimer(strategies.source.scenario, _Doubtful({_IN_NODE: 1.0}, at_bound=at_bound))
        .time(strategies)
        .step_us
        for at_bound in (False, True)
    )
    a, b = doubled - estimate
    assert estimate[1] - estimate[0] == pytest.approx(b - a)
    is_elsewhere = provenance in (Provenance.TRANSFERRED, Provenance.ANALYTICAL)
    c = CORRELATIONS[_IN_NODE + len(ERROR_FAMILIES) * is_elsewhere]
    enough = (b - a) / np.sqrt(a**2 + b**2 - 2 * c * a * b)
    for ratio, is_tie in ((0.0, False), (0.99 * enough, False), (1.01 * enough, True)):
        assert [True, is_tie] == _ties_of_two({_IN_NODE: ratio, _PRODUCTS: products}, provenance)


def test_what_is_told_from_elsewhere_errs_more_alike() -> None:
    """A device that was left out is missed as a whole; no correlation is none or all of it."""
    own, elsewhere = np.split(CORRELATIONS, 2)
    assert (own > 0).all()
    assert (elsewhere <= 1).all()
    assert (own <= elsewhere).all()


@pytest.mark.parametrize("device", ["a100_sxm_80", "b200"])
def test_families_timed_at_once_are_each_as_if_alone(device: str) -> None:
    """Also where products are held to the rate that lasts, which bounds are not by themselves."""
    request = _request(device)
    strategies, scenario = _strategies(request), resolve_space(request).source.scenario
    predictor = _Doubtful(dict.fromkeys(range(len(ERROR_FAMILIES)), 0.5))
    times = StepTimer(scenario, predictor).time(strategies)
    errors = time_errors(_answers(strategies, times), predictor)
    assert 2 == predictor.num_queries
    own, elsewhere = np.split(times.step_us + errors.of_steps.up_us, 2)
    alone = [
        StepTimer(scenario, _Doubtful({family: 0.5}, at_bound=True)).time(strategies).step_us
        for family in range(len(ERROR_FAMILIES))
    ]
    np.testing.assert_allclose(own, alone)
    np.testing.assert_allclose(elsewhere, [times.step_us] * len(ERROR_FAMILIES))


def test_who_wants_no_ties_asks_once() -> None:
    counts = []
    for has_ties in (False, True):
        predictor = _Doubtful({_IN_NODE: 3.0})
        setting = Setting(predictor=predictor, has_ties=has_ties)
        answer_in_closed_form(_request(), setting, lambda _: None)
        counts.append(predictor.num_queries)
    assert [1, 2] == counts


def test_what_is_listed_has_the_bounds_of_errors_by_family() -> None:
    """Whatever all operators at their bounds at once would take: that decides what is looked at."""
    predictor = _Doubtful({_PRODUCTS: 0.3, _IN_NODE: 0.6})
    ranked = answer_in_closed_form(_request(), Setting(predictor=predictor), lambda _: None).ranked
    assert ranked is not None
    scenario = ranked.strategies.source.scenario
    cases_us = StepTimer(scenario, predictor, price_cases).time(ranked.strategies).variants_us
    expected = [bound_cases(of_step_us) for of_step_us in cases_us.T]
    np.testing.assert_allclose(np.stack((ranked.low_us, ranked.high_us), axis=1), expected)
    at_once = StepTimer(scenario, predictor).time(ranked.strategies)
    assert (at_once.low_us < ranked.low_us).all()
    assert (ranked.high_us < at_once.high_us).all()
