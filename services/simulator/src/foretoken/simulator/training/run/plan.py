"""Plan a whole training run: its steps, what interrupts them, what it costs and when it is done."""

import json
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain import schema
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.dataset import find_dataset
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import (
    FailureRules,
    RunSize,
    SiteRules,
    TrainingRunReport,
    TrainingRunRequest,
)
from foretoken.domain.results.report import Feasibility, Percentiles
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import MS_PER_S, S_PER_DAY, S_PER_HOUR, ceil_divide
from foretoken.simulator.echo import echo_run
from foretoken.simulator.training.run.cost import DeviceCost, find_cost
from foretoken.simulator.training.run.draws import draw_runs
from foretoken.simulator.training.run.failures import ExpectedRun, FailureModel
from foretoken.simulator.training.run.notes import describe_quickest, list_notes
from foretoken.simulator.training.run.size import SizeSearch
from foretoken.simulator.training.step import simulate_training


def count_summed_bytes(scenario: TrainingScenario) -> float:
    """Return the bytes of the model's gradients, in the format that they are reduced in."""
    trainer = scenario.trainer.resolve()
    dtype = trainer.gradient_dtype or scenario.dtype.kept_in_training
    return count_parameters(scenario.model).total * dtype.num_bytes


def site_wait_s(scenario: TrainingScenario, sites: SiteRules) -> float:
    """Return what a step waits for other sites, the mean over steps.

    Within a site gradients are summed as the scenario says. Then each site has one sum, in shards
    on its devices, and the sites' links carry it around a ring: a reduce-scatter and an all-gather.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2), 2009; Douillard et al., "DiLoCo", 2023, for sums that are not made in
    every step.
    """
    others = sites.num_sites - 1
    if not others:
        return 0.0
    sent_bytes = 2 * others / sites.num_sites * count_summed_bytes(scenario)
    latency_s = 2 * others * sites.latency_ms / MS_PER_S
    return (sent_bytes / sites.bytes_per_s + latency_s) / sites.sync_steps


# Adam's first and second moment.
_NUM_MOMENTS = 2


def count_checkpoint_bytes(scenario: TrainingScenario) -> float:
    """Return the bytes of parameters and optimizer, each written once whoever holds copies.

    They are those that devices hold: weights in the compute format next to the optimizer's own,
    unless the trainer trains the latter.
    """
    trainer = scenario.trainer.resolve()
    per_param = trainer.master_dtype.num_bytes + _NUM_MOMENTS * trainer.moment_dtype.num_bytes
    if not trainer.trains_master_weights:
        per_param += scenario.dtype.kept_in_training.num_bytes
    return count_parameters(scenario.model).total * per_param


def write_s(scenario: TrainingScenario, failures: FailureRules) -> float:
    """Return how long a checkpoint takes to write, by all devices of a site at once."""
    if failures.checkpoint_s:
        return failures.checkpoint_s
    bytes_per_s = failures.checkpoint_bytes_per_s * scenario.layout.num_devices
    return count_checkpoint_bytes(scenario) / bytes_per_s


_HOURS_PER_DAY = 24.0


def plan_training_run(request: TrainingRunRequest, predictor: PredictorPort) -> TrainingRunReport:
    """Return what a run takes, expected over the chance of failures.

    A layout that does not fit, or a run that fails more than it trains, is a result with its
    reason and without days, money or energy. Where memory lacks, its step is estimated, as of a
    device with more of it, and other numbers of devices are tried all the same.

    Raises:
        InvalidRequestError: the batch does not divide, rules contradict each other, or a device has
            no price.
        UnknownPluginError: no dataset, price list, schedule or trainer of that name.

    """
    cost = find_cost(request.scenario, request.prices)
    step = simulate_training(request.scenario, predictor, None)
    num_tokens = count_tokens(request)
    report = TrainingRunReport(
        feasibility=step.feasibility,
        num_tokens=num_tokens,
        num_devices=step.num_devices * request.sites.num_sites,
        step_time_ms=step.step_time_ms,
        usd_per_hour=cost.usd_per_hour,
        price_source=cost.source,
        model_version=step.model_version,
        request_json=json.dumps(schema.encode(request)),
        echo=echo_run(request, step.step_time_ratio_by_provenance),
    )
    if step.step_time_ms == 0:
        return report
    run = _Run(request, request.scenario, num_tokens)
    report = replace(report, num_steps=run.num_steps, notes=list_notes(request, run.failures, step))
    if not run.can_end(step.step_time_ms):
        return replace(report, feasibility=_never_ends(run))
    if step.feasibility.is_feasible:
        report = _with_money(_with_time(report, run, step), cost)

    def measure(scenario: TrainingScenario) -> RunSize:
        is_own = scenario.layout == request.scenario.layout
        sized = step if is_own else simulate_training(scenario, predictor, None)
        return _measure_size(_Run(request, scenario, num_tokens), sized, cost)

    return _with_sizes(report, request, SizeSearch(request.scenario, measure))


def count_tokens(request: TrainingRunRequest) -> float:
    """Return the tokens to train on."""
    if not request.dataset:
        return request.num_tokens
    return find_dataset(request.dataset).num_tokens * request.num_epochs


def model_failures(scenario: TrainingScenario, request: TrainingRunRequest) -> FailureModel:
    """Return how a run of the scenario fails on the sites that a request has."""
    rules = request.failures
    num_devices = scenario.layout.num_devices * request.sites.num_sites
    mtbf_s = rules.device_mtbf_hours * S_PER_HOUR
    writing_s = write_s(scenario, rules)
    is_asynchronous = rules.is_checkpoint_asynchronous
    return FailureModel(
        rate_per_s=num_devices / mtbf_s if mtbf_s else 0.0,
        restart_s=rules.restart_s,
        stall_s=rules.checkpoint_stall_s if is_asynchronous else writing_s,
        delay_s=writing_s if is_asynchronous else 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a scenario, whose step time is still to be said."""

    request: TrainingRunRequest
    scenario: TrainingScenario
    num_tokens: float

    @property
    def num_steps(self) -> float:
        scenario, num_sites = self.request.scenario, self.request.sites.num_sites
        step_tokens = scenario.global_batch_size * scenario.sequence_length * num_sites
        return float(ceil_divide(self.num_tokens, step_tokens))

    @property
    def failures(self) -> FailureModel:
        return model_failures(self.scenario, self.request)

    @property
    def wait_s(self) -> float:
        """What a step waits for other sites."""
        return site_wait_s(self.scenario, self.request.sites)

    def step_s(self, step_time_ms: float) -> float:
        """Return a step with its wait."""
        return step_time_ms / MS_PER_S + self.wait_s

    def interval_s(self, step_time_ms: float) -> float:
        """Return the training between checkpoints: asked for or best, but a step at least."""
        failures = self.failures
        wanted = self.request.failures.checkpoint_interval_s or failures.best_interval()
        return max(wanted, failures.shortest_s, self.step_s(step_time_ms))

    def can_end(self, step_time_ms: float) -> bool:
        interval_s = min(self.interval_s(step_time_ms), self.num_steps * self.step_s(step_time_ms))
        return self.failures.can_end(interval_s)

    def expect(self, step_time_ms: float) -> ExpectedRun:
        work_s = self.num_steps * self.step_s(step_time_ms)
        return self.failures.expect_run(work_s, self.interval_s(step_time_ms))

    def spread_days(self, step_time_ms: float) -> Percentiles:
        expected = self.expect(step_time_ms)
        drawn = draw_runs(self.failures, expected.work_s, expected.interval_s) / S_PER_DAY
        p50, p90, p95, p99 = np.percentile(drawn, (50, 90, 95, 99))
        return Percentiles(
            mean=expected.total_s / S_PER_DAY,
            p50=float(p50),
            p90=float(p90),
            p95=float(p95),
            p99=float(p99),
            max=float(drawn.max()),
        )


def _with_time(report: TrainingRunReport, run: _Run, step: TrainingReport) -> TrainingRunReport:
    expected = run.expect(step.step_time_ms)
    ideal_s = run.num_steps * step.step_time_ms / MS_PER_S
    low, high = (
        _days(run.expect(bound)) if bound and run.can_end(bound) else 0.0
        for bound in (step.step_time_low_ms, step.step_time_high_ms)
    )
    return replace(
        report,
        ideal_days=ideal_s / S_PER_DAY,
        days=_days(expected),
        days_low=low,
        days_high=high,
        days_spread=run.spread_days(step.step_time_ms),
        goodput_ratio=ideal_s / expected.total_s,
        checkpoint_ratio=expected.checkpoint_s / expected.total_s,
        repeated_ratio=expected.repeated_s / expected.total_s,
        restart_ratio=expected.restart_s / expected.total_s,
        sites_ratio=run.num_steps * run.wait_s / expected.total_s,
        num_failures=expected.num_failures,
        checkpoint_interval_s=expected.interval_s,
        checkpoint_s=write_s(run.scenario, run.request.failures),
        checkpoint_bytes=count_checkpoint_bytes(run.scenario),
    )


def _with_money(report: TrainingRunReport, cost: DeviceCost) -> TrainingRunReport:
    device_hours = report.days * _HOURS_PER_DAY * report.num_devices
    usd = cost.usd(device_hours)
    return replace(
        report,
        device_hours=device_hours,
        usd=usd,
        usd_per_step=usd / report.num_steps,
        energy_kwh=cost.energy_kwh(device_hours),
        energy_usd=cost.energy_usd(device_hours),
    )


def _with_sizes(
    report: TrainingRunReport, request: TrainingRunRequest, search: SizeSearch
) -> TrainingRunReport:
    if not request.target_days:
        search.show()
        return replace(report, sizes=search.sizes)
    fewest, sizes = search.find_fewest(), search.sizes
    notes = report.notes
    if not fewest:
        notes = (describe_quickest(sizes, request.target_days), *notes)
    return replace(report, target_devices=fewest, sizes=sizes, notes=notes)


def _measure_size(run: _Run, step: TrainingReport, cost: DeviceCost) -> RunSize:
    num_devices = step.num_devices * run.request.sites.num_sites
    size = RunSize(
        num_devices=num_devices,
        dp=run.scenario.layout.dp,
        step_time_ms=step.step_time_ms,
        goodput_ratio=0.0,
        days=0.0,
        usd=0.0,
    )
    if not step.feasibility.is_feasible:
        return replace(size, reason=step.feasibility.reason)
    if not run.can_end(step.step_time_ms):
        return replace(size, reason=_never_ends(run).reason)
    expected = run.expect(step.step_time_ms)
    days, target_days = _days(expected), run.request.target_days
    return replace(
        size,
        goodput_ratio=run.num_steps * step.step_time_ms / MS_PER_S / expected.total_s,
        days=days,
        usd=cost.usd(days * _HOURS_PER_DAY * num_devices),
        is_enough=0 < days <= target_days,
    )


def _days(expected: ExpectedRun) -> float:
    return expected.total_s / S_PER_DAY


def _never_ends(run: _Run) -> Feasibility:
    between_s = 1 / run.failures.rate_per_s
    reason = (
        f"the run fails every {between_s:.3g} s, which is too often to get from one checkpoint to"
        " the next: write them faster (failures.checkpoint_bytes_per_s, checkpoint_interval_s) or"
        " restart faster (failures.restart_s)"
    )
    return Feasibility(is_feasible=False, reason=reason)
