"""A whole run: steps, sites, money, energy, a target date."""

import json
import math
from dataclasses import replace

import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.hardware.price import DevicePrice, PriceList
from foretoken.domain.requests.dataset import find_dataset
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import (
    FailureRules,
    PriceRules,
    RunSize,
    SiteRules,
    TrainingRunReport,
    TrainingRunRequest,
)
from foretoken.simulator.training.run.plan import count_checkpoint_bytes, plan_training_run
from foretoken.simulator.training.run.size import SizeSearch, list_degrees
from foretoken.simulator.training.step import simulate_training

# 2 x 2 x 4 devices, 64 samples of 4,096 tokens a step.
_SCENARIO = build_scenario(
    ParallelLayout(tp=2, pp=2, dp=4), global_batch_size=64, recompute="full", zero_stage=1
)
_TOKENS = 1e10
_STEPS = math.ceil(_TOKENS / (64 * 4096))
_RUN = TrainingRunRequest(scenario=_SCENARIO, num_tokens=_TOKENS)
_FAILS = FailureRules(device_mtbf_hours=500, checkpoint_s=30, restart_s=300)


def _plan(request: TrainingRunRequest) -> TrainingRunReport:
    return plan_training_run(request, RooflinePredictor())


def test_a_run_without_failures_is_its_steps() -> None:
    """And one checkpoint at its end."""
    report = _plan(replace(_RUN, failures=FailureRules(checkpoint_s=60)))
    step = simulate_training(_SCENARIO, RooflinePredictor(), None)
    step_ms, days_per_ms = step.step_time_ms, _STEPS / 1e3 / 86400
    assert report.num_steps == _STEPS
    assert report.num_devices == 16
    assert report.step_time_ms == step_ms
    assert pytest.approx(days_per_ms * step_ms) == report.ideal_days
    assert pytest.approx(report.ideal_days + 60 / 86400) == report.days
    assert pytest.approx(report.days) == report.days_spread.p99
    low_days, high_days = (
        days_per_ms * bound_ms for bound_ms in (step.step_time_low_ms, step.step_time_high_ms)
    )
    assert pytest.approx(low_days + 60 / 86400) == report.days_low
    assert pytest.approx(high_days + 60 / 86400) == report.days_high
    assert report.num_failures == 0


def test_failures_take_their_share_and_all_shares_are_the_run() -> None:
    report = _plan(replace(_RUN, failures=_FAILS))
    ratios = (
        *(report.goodput_ratio, report.checkpoint_ratio, report.repeated_ratio),
        *(report.restart_ratio, report.sites_ratio),
    )
    assert pytest.approx(1.0) == sum(ratios)
    assert report.sites_ratio == 0
    assert pytest.approx(report.days * 24 * 16 / 500) == report.num_failures
    spread = report.days_spread
    assert report.ideal_days < spread.p50 < spread.p90 < spread.p99 <= spread.max
    assert spread.mean == report.days


def test_the_chosen_interval_beats_others_that_are_asked_for() -> None:
    best = _plan(replace(_RUN, failures=_FAILS))
    for factor in (0.5, 2):
        asked_s = factor * best.checkpoint_interval_s
        asked = replace(_FAILS, checkpoint_interval_s=asked_s)
        report = _plan(replace(_RUN, failures=asked))
        assert pytest.approx(asked_s) == report.checkpoint_interval_s
        assert report.days > best.days


def test_a_checkpoint_beside_training_costs_less() -> None:
    beside = replace(_FAILS, is_checkpoint_asynchronous=True, checkpoint_stall_s=1)
    waiting, hidden = (_plan(replace(_RUN, failures=rules)) for rules in (_FAILS, beside))
    assert hidden.checkpoint_ratio < waiting.checkpoint_ratio
    assert hidden.days < waiting.days
    assert hidden.checkpoint_interval_s >= 29


def test_a_checkpoint_is_what_one_device_holds_of_the_states() -> None:
    """On a single device nothing is a copy: the memory model's weights and optimizer are it."""
    scenario = build_scenario(ParallelLayout(), global_batch_size=1)
    stage = simulate_training(scenario, RooflinePredictor(), None).memory[0]
    held = stage.weights_bytes + stage.optimizer_bytes
    assert pytest.approx(held, rel=1e-3) == count_checkpoint_bytes(scenario)


def test_a_checkpoint_is_written_by_all_devices() -> None:
    rules = FailureRules(device_mtbf_hours=1000, checkpoint_bytes_per_s=1e8)
    report = _plan(replace(_RUN, failures=rules))
    assert pytest.approx(report.checkpoint_bytes / (16 * 1e8)) == report.checkpoint_s


def test_sites_sum_gradients_around_a_ring() -> None:
    """Three sites send 2 x 2/3 of the fp32 gradients, and wait 4 times for the link."""
    sites = SiteRules(num_sites=3, bytes_per_s=1e9, latency_ms=50, sync_steps=10)
    report = _plan(replace(_RUN, sites=sites))
    gradients = 4 * 6_738_415_616
    wait_s = (2 * 2 / 3 * gradients / 1e9 + 4 * 0.05) / 10
    assert report.num_devices == 48
    assert report.num_steps == math.ceil(_TOKENS / (3 * 64 * 4096))
    assert pytest.approx(report.num_steps * wait_s / 86400) == report.sites_ratio * report.days


def test_sums_that_are_made_less_often_take_less_of_the_run() -> None:
    links = [SiteRules(num_sites=2, bytes_per_s=1e9, sync_steps=steps) for steps in (1, 100)]
    often, seldom = (_plan(replace(_RUN, sites=sites)) for sites in links)
    assert seldom.sites_ratio < often.sites_ratio
    assert seldom.goodput_ratio > often.goodput_ratio


def test_money_is_device_hours_and_energy() -> None:
    """16 devices of 400 W at 2 USD, the data centre takes 1.5 times their power at 0.1 USD."""
    prices = PriceRules(usd_per_hour=2, device_w=400, pue=1.5, usd_per_kwh=0.1)
    report = _plan(replace(_RUN, prices=prices))
    hours = report.days * 24 * 16
    assert pytest.approx(hours) == report.device_hours
    assert pytest.approx(hours * 0.4 * 1.5) == report.energy_kwh
    assert pytest.approx(report.energy_kwh * 0.1) == report.energy_usd
    assert pytest.approx(hours * 2 + report.energy_usd) == report.usd
    assert pytest.approx(report.usd / _STEPS) == report.usd_per_step
    assert report.price_source == "given"


def test_prices_come_from_a_list_of_the_user_s() -> None:
    own = PriceList(
        name="ours", prices=(DevicePrice(device="a100_sxm_80", usd_per_hour=3, source="contract"),)
    )
    report = _plan(replace(_RUN, prices=PriceRules(own_list=own)))
    assert report.usd_per_hour == 3
    assert report.price_source == "ours: a100_sxm_80: on demand, contract"
    with pytest.raises(InvalidRequestError, match="no spot price of a100_sxm_80"):
        _plan(replace(_RUN, prices=PriceRules(own_list=own, is_spot=True)))


def test_stages_on_different_devices_are_priced_each_by_its_own() -> None:
    """Half of the devices at 3 USD and 400 W, half at 5 USD and 700 W."""
    own = PriceList(
        name="ours",
        prices=(
            DevicePrice(device="a100_sxm_80", usd_per_hour=3),
            DevicePrice(device="h100_sxm", usd_per_hour=5),
        ),
    )
    devices = ("a100_sxm_80", "h100_sxm")
    scenario = replace(_SCENARIO, stage_devices=devices, topology="")
    report = _plan(replace(_RUN, scenario=scenario, prices=PriceRules(own_list=own)))
    assert report.usd_per_hour == 4
    assert pytest.approx(report.device_hours * 0.55) == report.energy_kwh


def test_a_dataset_gives_the_tokens() -> None:
    report = _plan(TrainingRunRequest(scenario=_SCENARIO, dataset="wikitext-103", num_epochs=2))
    assert report.num_tokens == 2 * find_dataset("wikitext-103").num_tokens
    assert any("wikitext-103 has 1.03e+08 tokens" in note for note in report.notes)
    with pytest.raises(UnknownPluginError, match="did you mean wikitext-103"):
        _plan(TrainingRunRequest(scenario=_SCENARIO, dataset="wikitext103"))


@pytest.mark.slow
def test_a_target_is_met_by_the_fewest_devices_that_can() -> None:
    """By trying every size one after the other."""
    request = replace(_RUN, failures=_FAILS)
    days = {}
    for dp in list_degrees(_SCENARIO):
        sized = replace(_SCENARIO, layout=ParallelLayout(tp=2, pp=2, dp=dp))
        report = _plan(replace(request, scenario=sized))
        if report.feasibility.is_feasible:
            days[4 * dp] = report.days
    for target in (0.9 * min(days.values()), *(1.01 * value for value in days.values())):
        enough = [devices for devices, value in days.items() if value <= target]
        report = _plan(replace(request, target_days=target))
        assert report.target_devices == min(enough, default=0)
        for size in report.sizes:
            assert size.is_enough == (0 < size.days <= target)


@pytest.mark.parametrize("fewest_fitting", [1, 4, 16, 32])
def test_a_target_is_met_between_sizes_that_do_not_fit_and_those_that_never_end(
    fewest_fitting: int,
) -> None:
    """Too few devices have no memory, too many fail too often; between them a few are enough."""

    def measure(scenario: TrainingScenario) -> RunSize:
        dp = scenario.layout.dp
        fits, ends = dp >= fewest_fitting, dp < 64
        days = 100 / dp + dp if fits and ends else 0.0
        return RunSize(
            num_devices=4 * dp,
            dp=dp,
            step_time_ms=float(fits),
            goodput_ratio=0.0,
            days=days,
            usd=0.0,
            is_enough=0 < days <= 40,
        )

    assert SizeSearch(_SCENARIO, measure).find_fewest() == 4 * max(4, fewest_fitting)


def test_a_target_that_cannot_be_met_says_what_comes_nearest() -> None:
    report = _plan(replace(_RUN, target_days=1e-3))
    quickest = min(report.sizes, key=lambda size: size.days)
    assert report.target_devices == 0
    assert f"the quickest are {quickest.num_devices} devices" in report.notes[0]


def test_checkpoints_that_take_longer_than_their_interval_follow_each_other() -> None:
    beside = replace(
        _FAILS, is_checkpoint_asynchronous=True, checkpoint_s=300, checkpoint_interval_s=60
    )
    report = _plan(replace(_RUN, failures=beside))
    assert report.checkpoint_interval_s == 300
    assert any("every 60 s cannot be" in note for note in report.notes)


def test_sizes_around_the_scenario_s_are_told_without_a_target() -> None:
    report = _plan(_RUN)
    assert [size.dp for size in report.sizes] == [2, 4, 8, 16]
    own = report.sizes[1]
    assert (own.num_devices, own.days, own.usd) == (16, report.days, report.usd)


def test_replicas_divide_the_batch() -> None:
    scenario = build_scenario(ParallelLayout(), global_batch_size=24, micro_batch_size=2)
    assert list(list_degrees(scenario)) == [1, 2, 3, 4, 6, 12]


def test_a_run_that_fails_too_often_is_a_result_with_advice() -> None:
    report = _plan(replace(_RUN, failures=FailureRules(device_mtbf_hours=0.01, restart_s=600)))
    assert not report.feasibility.is_feasible
    assert "restart faster" in report.feasibility.reason
    assert report.days == 0


def test_a_layout_that_cannot_be_is_a_result() -> None:
    scenario = replace(_SCENARIO, layout=ParallelLayout(pp=64))
    report = _plan(replace(_RUN, scenario=scenario))
    assert not report.feasibility.is_feasible
    assert (report.days, report.step_time_ms) == (0, 0)


def test_what_does_not_fit_has_no_days_and_says_so() -> None:
    """Its step is estimated, as of devices with more memory; what would be paid for it is not."""
    scenario = replace(_SCENARIO, layout=ParallelLayout(dp=4), recompute="none", zero_stage=0)
    report = _plan(replace(_RUN, scenario=scenario, prices=PriceRules(price_list="lambda")))
    assert not report.feasibility.is_feasible
    assert "GiB" in report.feasibility.reason
    assert report.step_time_ms > 0
    nothing = (report.days, report.device_hours, report.usd, report.usd_per_step, report.energy_kwh)
    assert nothing == (0, 0, 0, 0, 0)


def test_a_report_has_the_request_that_made_it() -> None:
    request = replace(_RUN, failures=_FAILS, prices=PriceRules(price_list="lambda"))
    report = _plan(request)
    again = schema.decode(TrainingRunRequest, json.loads(report.request_json))
    assert again == request
    assert replace(_plan(again), request_json="") == replace(report, request_json="")
