"""The echo of every answer of the simulator: see `foretoken.domain.results.echo`."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from foretoken.domain.hardware.device import find_device
from foretoken.domain.models.architecture import ModelArchitecture, all_models
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.question import (
    describe_capacity,
    describe_run,
    describe_serving,
    describe_serving_search,
    describe_training,
    describe_training_search,
)
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.search import (
    CandidateColumns,
    CapacityReport,
    CapacityRequest,
    ServingSearchReport,
    ServingSearchRequest,
)
from foretoken.domain.requests.training_run import TrainingRunRequest
from foretoken.domain.requests.training_search import (
    StrategyColumns,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.domain.results.accuracy import describe_accuracy, format_name, grounds_of
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.cluster.fleet import pool_scenarios
from foretoken.simulator.cost.latency_surfaces import quantization_of
from foretoken.simulator.validation.published_step import (
    AskedStep,
    find_nearest_step,
    read_published_steps,
)

Shares = Mapping[str, float]

# Below this share of time not measured there is little left to narrow.
_NARROW_ENOUGH = 0.005
_NOT_TIMED = "no time is given: nothing that was asked can run within what was given"


def echo_serving(scenario: ServingScenario, report: ServingReport) -> ServingReport:
    """Return the report of a serving simulation with its echo."""
    shares = report.step_time_ratio_by_provenance
    echo = Echo(question=describe_serving(scenario), remarks=_remarks(scenario))
    calls = _served(scenario)
    echo = _as_served(echo, shares, calls)
    return replace(report, echo=_grounded(echo, shares, _narrowing(calls, shares)))


def echo_capacity(request: CapacityRequest, report: CapacityReport) -> CapacityReport:
    """Return the answer of a capacity search with its echo."""
    shares, scenario = report.at_capacity.step_time_ratio_by_provenance, request.scenario
    echo = Echo(question=describe_capacity(request), remarks=_remarks(scenario))
    calls = _served(scenario)
    echo = _as_served(echo, shares, calls)
    return replace(report, echo=_grounded(echo, shares, _narrowing(calls, shares)))


def echo_serving_search(
    request: ServingSearchRequest, report: ServingSearchReport
) -> ServingSearchReport:
    """Return the answer of a search for deployments with its echo, by its best."""
    basis, shares = _best_shares(report)
    scenario, space = request.scenario, request.space
    calls = [
        (scenario.model, device, layout)
        for device in space.devices or (scenario.device,)
        for layout in _layouts(report.candidates, {report.best, *report.ties}, scenario.layout)
    ]
    varied = [
        replace(scenario, device=device, quantization=scheme, cluster=None)
        for device in space.devices or (scenario.device,)
        for scheme in space.quantizations or (scenario.quantization,)
    ]
    echo = Echo(
        question=describe_serving_search(request),
        basis=basis,
        remarks=tuple(dict.fromkeys(text for part in varied for text in _remarks(part))),
    )
    echo = _as_served(echo, shares, _of_best(calls, report))
    return replace(report, echo=_grounded(echo, shares, _narrowing(calls, shares)))


def echo_training(scenario: TrainingScenario, report: TrainingReport) -> TrainingReport:
    """Return the report of a training step with its echo."""
    shares = report.step_time_ratio_by_provenance
    basis = "the critical stage" if shares else ""
    echo = Echo(question=describe_training(scenario), basis=basis)
    echo = _as_trained(echo, scenario, shares, _asked(scenario))
    return replace(report, echo=_grounded(echo, shares, _trained(scenario, shares)))


def echo_run(request: TrainingRunRequest, shares: Shares) -> Echo:
    """Return the echo of a plan of a run; `shares` are those of its simulated step."""
    basis = "its simulated step" if shares else ""
    echo = Echo(question=describe_run(request), basis=basis)
    echo = _as_trained(echo, request.scenario, shares, _asked(request.scenario))
    return _grounded(echo, shares, _trained(request.scenario, shares))


def echo_training_search(
    request: TrainingSearchRequest, report: TrainingSearchReport
) -> TrainingSearchReport:
    """Return the answer of a search for strategies with its echo, by its best."""
    basis, shares = _best_shares(report)
    scenario, space = request.scenario, request.space
    firsts = {report.best.get(request.objective, ""), *report.ties}
    grouped = tuple(group.device for group in space.node_groups)
    calls = [
        (scenario.model, device, layout)
        for device in dict.fromkeys(grouped or space.devices or (scenario.device,))
        for layout in _layouts(report.candidates, firsts, scenario.layout)
    ]
    echo = Echo(question=describe_training_search(request), basis=basis)
    best = report.best.get(request.objective, "")
    echo = _as_trained(echo, scenario, shares, _asked_of_row(scenario, report.candidates, best))
    narrowing = _narrowing(calls, shares, is_training=True)
    return replace(report, echo=_grounded(echo, shares, narrowing))


_Call = tuple[ModelArchitecture, str, ParallelLayout]


def _as_served(echo: Echo, shares: Shares, calls: Iterable[_Call]) -> Echo:
    """Return the echo with how far such deployments were off, where a time was predicted."""
    if not shares:
        return echo
    facts = {
        "grounds": grounds_of(shares),
        "architecture": _architecture(device for _, device, _ in calls),
    }
    return replace(echo, accuracy=describe_accuracy("serving", facts))


def _architecture(devices: Iterable[str]) -> str:
    """Return the architecture of all these devices; empty where they differ."""
    found = {find_device(name).architecture for name in devices}
    return found.pop() if len(found) == 1 else ""


def _of_best(calls: list[_Call], report: ServingSearchReport) -> list[_Call]:
    """Return the calls on the device of the best deployment; all where nothing qualifies."""
    table = report.candidates
    named = zip(table.device, table.name, strict=True)
    best = {str(device) for device, name in named if name == report.best}
    return [call for call in calls if call[1] in best] or calls


def _asked(scenario: TrainingScenario) -> AskedStep | None:
    """Return the step of a scenario; None where its stages are on devices that differ."""
    if scenario.stage_devices:
        return None
    return AskedStep(
        model=scenario.model,
        device=scenario.device,
        dtype=scenario.dtype.name.lower(),
        sequence_length=scenario.sequence_length,
        num_devices=scenario.layout.num_devices,
        layout=scenario.layout,
    )


def _asked_of_row(
    scenario: TrainingScenario, table: StrategyColumns, best: str
) -> AskedStep | None:
    """Return the step of the best of a search; None without one, or on devices that differ."""
    places = [place for place, name in enumerate(table.name) if name == best]
    asked = _asked(scenario)
    if asked is None or not places or (len(table.placement) and table.placement[places[0]]):
        return None
    tp, pp, dp, cp, ep = (
        max(int(column[places[0]]), 1)
        for column in (table.tp, table.pp, table.dp, table.cp, table.ep)
    )
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
    device = str(table.device[places[0]])
    return replace(asked, device=device, num_devices=layout.num_devices, layout=layout)


def _as_trained(
    echo: Echo, scenario: TrainingScenario, shares: Shares, asked: AskedStep | None
) -> Echo:
    """Return the echo with how far such steps were off, where a time was predicted.

    A step that was measured, like the one that is `asked`, is named.
    """
    if not shares:
        return echo
    nearest = find_nearest_step(read_published_steps(), asked) if asked else None
    remarks = (f"nearest measured step: {nearest.describe()}",) if nearest else ()
    facts = {
        "architecture": _architecture(
            [asked.device] if asked else scenario.stage_devices or [scenario.device]
        ),
        "experts": "yes" if stack_of(scenario.model).experts else "no",
        "format": format_name(scenario.dtype),
        "grounds": grounds_of(shares),
    }
    accuracy = describe_accuracy("training", facts)
    return replace(echo, accuracy=accuracy, remarks=(*echo.remarks, *remarks))


def _grounded(echo: Echo, shares: Shares, narrowing: str) -> Echo:
    if not shares:
        return replace(echo, basis=echo.basis or _NOT_TIMED)
    return replace(echo, time_ratio_by_provenance=dict(shares), narrowing=narrowing)


def _best_shares(report: ServingSearchReport | TrainingSearchReport) -> tuple[str, Shares]:
    """Return what the shares are of, and the shares: of the first finalist, or of the estimate."""
    for finalist in report.finalists:
        if finalist.report.step_time_ratio_by_provenance:
            return finalist.name, finalist.report.step_time_ratio_by_provenance
    return report.echo.basis, report.echo.time_ratio_by_provenance


def _remarks(scenario: ServingScenario) -> tuple[str, ...]:
    """Return what engines run in another way than asked, of all pools, and what corrects them."""
    found = [quantization_of(part).remark for part in pool_scenarios(scenario)]
    if scenario.correction:
        found.append(f"times are corrected by `{scenario.correction}`")
    return tuple(dict.fromkeys(remark for remark in found if remark))


def _served(scenario: ServingScenario) -> list[_Call]:
    return [(part.model, part.device, part.layout) for part in pool_scenarios(scenario)]


def _trained(scenario: TrainingScenario, shares: Shares) -> str:
    devices = dict.fromkeys(scenario.stage_devices or (scenario.device,))
    calls = [(scenario.model, device, scenario.layout) for device in devices]
    return _narrowing(calls, shares, is_training=True)


def _layouts(
    table: CandidateColumns | StrategyColumns, firsts: Collection[str], layout: ParallelLayout
) -> list[ParallelLayout]:
    """Return how the best split layers, and what ties with them; without any, the scenario's."""
    degrees = [table.tp, table.prefill_tp] if isinstance(table, CandidateColumns) else [table.tp]
    found = {
        int(tp)
        for column in degrees
        for name, tp in zip(table.name, column, strict=True)
        if name in firsts and tp
    }
    return [ParallelLayout(tp=tp) for tp in sorted(found)] or [layout]


def _narrowing(calls: Iterable[_Call], shares: Shares, *, is_training: bool = False) -> str:
    """Return the commands that time what was not measured, a profile for each device."""
    if 1 - shares.get("measured", 0.0) <= _NARROW_ENOUGH:
        return ""
    degrees: dict[tuple[str, str], dict[int, None]] = {}
    for model, device, layout in calls:
        name = model.name if model.name in all_models() else "config.json"
        degrees.setdefault((name, device), {})[layout.tp] = None
    training = " --training" if is_training else ""
    profiles = [
        f"`foretoken profile --device {device} --model {name} --tp"
        f" {','.join(map(str, sorted(found)))}{training}`"
        for (name, device), found in degrees.items()
    ]
    brought = ""
    if not any(shares.get(name) for name in ("measured", "interpolated", "extrapolated")):
        # Nothing of the device: tables that others measured may be nearer at hand.
        brought = ", or NVIDIA's tables if they have it (`foretoken catalog install nvidia`)"
    return f"{' and '.join(profiles)} where the device is{brought}; then `foretoken train`"
