"""What the best strategy becomes when one thing changes."""

from dataclasses import replace

import numpy as np
import pytest
from training_fakes import DEVICE, RooflinePredictor, build_scenario

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.training_search import (
    StrategySensitivity,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.hardware_change import FasterPredictor
from foretoken.simulator.search.training.changes import list_changes
from foretoken.simulator.search.training.closed_form import Setting, answer_in_closed_form
from foretoken.simulator.search.training.search import search_training

_REQUEST = TrainingSearchRequest(
    scenario=build_scenario(
        ParallelLayout(dp=8),
        model=find_model("tiny-llama"),
        device=DEVICE,
        sequence_length=512,
        global_batch_size=32,
    ),
    space=TrainingSpace(
        tp=(1, 2),
        pp=(1, 2),
        cp=(1,),
        micro_batch_sizes=(2, 4),
        recompute=("none", "full"),
        weight_parallel=("",),
        zero_stages=(0, 1),
        overlaps=("none", "all"),
        usd_per_hour={DEVICE: 2.0},
    ),
    num_finalists=0,
    has_sensitivity=True,
)


def _find(request: TrainingSearchRequest) -> tuple[StrategySensitivity, ...]:
    return search_training(request, RooflinePredictor(), InlineContext()).sensitivities


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["throughput_per_gpu", "step_time", "cost"])
def test_one_pass_finds_what_asking_for_each_change_finds(objective: str) -> None:
    """Other prices for what is lowered once, and both batches together, are no other question."""
    request = replace(_REQUEST, objective=objective)
    predictor = RooflinePredictor()
    changes, found = list_changes(request), _find(request)
    assert [change.words for change in changes] == [item.change for item in found]
    for change, item in zip(changes, found, strict=True):
        setting = Setting(
            predictor=FasterPredictor(predictor, change.hardware),
            memory_ratio=change.hardware.memory_capacity,
            has_ties=False,
        )
        form = answer_in_closed_form(change.request, setting, lambda _: None)
        assert form.ranked is not None
        assert form.survey.num_fitting == item.num_fitting
        assert form.ranked.step_us[0] / 1000 == pytest.approx(item.step_time_ms)
        assert form.ranked.tokens_per_s_per_gpu[0] == pytest.approx(item.tokens_per_s_per_gpu)


def test_the_best_of_a_change_is_no_worse_than_the_best_today() -> None:
    for item in _find(_REQUEST):
        assert item.throughput_ratio >= item.same_throughput_ratio * (1 - 1e-9)
        if item.is_same_best:
            assert item.throughput_ratio == pytest.approx(item.same_throughput_ratio)


def test_better_hardware_takes_nothing_away() -> None:
    """Capacity makes room for more strategies, and leaves the speed of each."""
    *hardware, half, twice = _find(_REQUEST)
    assert all(item.throughput_ratio >= 1 - 1e-9 for item in hardware)
    fits = [item.num_fitting for item in hardware]
    links, bandwidth, capacity, both, arithmetic = fits
    assert links == bandwidth == arithmetic <= capacity == both
    assert half.throughput_ratio <= twice.throughput_ratio


def test_a_batch_that_today_s_best_cannot_have_is_said_so() -> None:
    """Eight replicas of four samples fill a batch of 32; one of 16 they do not."""
    space = replace(_REQUEST.space, tp=(1,), pp=(1,), micro_batch_sizes=(4,))
    *_, half, twice = _find(replace(_REQUEST, space=space))
    assert (0, "", 0.0) == (half.num_fitting, half.best, half.same_throughput_ratio)
    assert not half.is_same_best
    assert twice.is_same_best


def test_names_tell_no_batch_where_the_request_has_one() -> None:
    assert all("gbs" not in item.best for item in _find(_REQUEST))


def test_what_fits_only_on_larger_memory_is_found() -> None:
    """A model that is too large for the device today: capacity is what lacks."""
    model = find_model("llama-2-7b")
    scenario = replace(
        _REQUEST.scenario,
        model=model,
        device="v100_pcie_16",
        topology="",
        sequence_length=2048,
        global_batch_size=8,
    )
    space = TrainingSpace(
        num_devices=(8,),
        tp=(1,),
        pp=(8,),
        cp=(1,),
        virtual_stages=(1,),
        micro_batch_sizes=(1,),
        weight_parallel=("",),
        sequence_parallel=(False,),
        zero_stages=(0,),
        overlaps=("none",),
        recompute=("full",),
    )
    request = replace(_REQUEST, scenario=scenario, space=space)
    report = search_training(request, RooflinePredictor(), InlineContext())
    assert 0 == report.num_fitting
    found = {item.change: item for item in report.sensitivities}
    capacity, links = found["memory capacity +50 %"], found["links 2x"]
    assert (1, 0.0, False) == (
        capacity.num_fitting,
        capacity.throughput_ratio,
        capacity.is_same_best,
    )
    assert capacity.best.startswith("tp1 pp8")
    assert (0, "", True) == (links.num_fitting, links.best, links.is_same_best)
    assert np.isfinite(capacity.step_time_ms)
