"""Whole steps of a model as they were measured, beside what operators alone make of them.

Nothing is fitted: a step is the sum of its operators' estimates, and of what the host takes as
`foretoken profile host` measures it on small models.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import OperatorCall, Provenance
from foretoken.domain.measurements.profiling import (
    DISTURBED_KEY,
    ClosureReport,
    ClosureStep,
    MeasuredStep,
)
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.training.operator_prices import OperatorPrices, Price, fetch_prices
from foretoken.simulator.validation.steps_host import HostTime, HostTimes, fetch_host_times
from foretoken.simulator.validation.steps_kernels import count_kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """The share of one kind of operator (`rms_norm backward`) in a predicted step, in µs."""

    name: str
    num_calls: int
    latency_us: float
    provenance: Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """A step as measured and as predicted; times in µs.

    `operators_us` is the sum of its operators, `host_us` what the host takes in all on a GPU and
    what it adds on a CPU (0: not measured). `shares` is the part of `operators_us` that rests on
    each provenance. `parts` come largest first.
    """

    measured: MeasuredStep
    predicted_us: float
    low_us: float
    high_us: float
    operators_us: float
    host_us: float
    num_kernels: int
    shares: Mapping[str, float]
    parts: tuple[StepPart, ...]

    @property
    def error_ratio(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_us / self.measured.latency_us_median - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsValidation:
    """The steps of one report. Errors are without sign; NaN where no step was measured.

    `failed` are the steps that could not be measured.
    """

    name: str
    model: str
    device: str
    framework: str
    model_version: str
    steps: tuple[StepComparison, ...]
    failed: tuple[MeasuredStep, ...]
    error_median: float
    error_p90: float
    notes: tuple[str, ...]


def validate_steps(report: ClosureReport, predictor: PredictorPort) -> StepsValidation:
    """Predict every step that was measured and compare.

    Raises:
        InvalidRequestError: the report does not say what model it is of.
        UnknownDeviceError: no such device.

    """
    measured = [step for step in report.steps if step.status == "ok"]
    lowered = [_lower(report, item.step) for item in measured]
    prices = _price(report, lowered, predictor)
    counts = [
        0 if item.step.mode == "compiled" else _count(report, nodes, item.step)
        for item, nodes in zip(measured, lowered, strict=True)
    ]
    hosts = fetch_host_times(
        [(item.step, count) for item, count in zip(measured, counts, strict=True)],
        report.device,
        report.dtype,
        predictor,
    )
    steps = tuple(
        _compare(item, nodes, prices, hosts, count)
        for item, nodes, count in zip(measured, lowered, counts, strict=True)
    )
    errors = [abs(step.error_ratio) for step in steps] or [float("nan")]
    return StepsValidation(
        name=report.name,
        model=report.model,
        device=report.device,
        framework=report.framework,
        model_version=prices.model_version,
        steps=steps,
        failed=tuple(step for step in report.steps if step.status != "ok"),
        error_median=float(np.median(errors)),
        error_p90=float(np.percentile(errors, 90)),
        notes=(
            *_doubts(report),
            *hosts.notes,
            *prices.list_notes(node for nodes in lowered for node in nodes),
        ),
    )


def _doubts(report: ClosureReport) -> tuple[str, ...]:
    """Return what disturbed the measured steps."""
    disturbed = report.environment.get(DISTURBED_KEY, "")
    return (f"disturbed while measured: {disturbed}",) if disturbed else ()


def _lower(report: ClosureReport, step: ClosureStep) -> Nodes:
    if report.architecture is None:
        raise InvalidRequestError.of_field("report", f"{report.name} has no architecture")
    form = ModelForm(
        model_type=report.environment.get("model_type", ModelForm().model_type),
        activation=report.environment.get("activation", ""),
        is_compiled=step.mode == "compiled",
    )
    return lower_step(step, report.architecture, report.dtype, form)


def _count(report: ClosureReport, nodes: Nodes, step: ClosureStep) -> int:
    if report.architecture is None:
        return 0
    return count_kernels(nodes, step, report.architecture, report.dtype)


def _price(
    report: ClosureReport, lowered: Sequence[Nodes], predictor: PredictorPort
) -> OperatorPrices:
    if report.architecture is None or not lowered:
        return OperatorPrices("", {})
    # Names the device and the number format; operators come from the steps alone.
    scenario = TrainingScenario(
        name=report.name,
        model=report.architecture,
        device=find_device(report.device).name,
        dtype=report.dtype,
    )
    return fetch_prices((node for nodes in lowered for node in nodes), scenario, predictor)


def _compare(
    measured: MeasuredStep,
    nodes: Nodes,
    prices: OperatorPrices,
    hosts: HostTimes,
    num_kernels: int,
) -> StepComparison:
    priced = [(node, prices.find(node)) for node in nodes]
    total = HostTime(
        latency_us=sum(price.latency_us * node.repeat for node, price in priced),
        low_us=sum(price.low_us * node.repeat for node, price in priced),
        high_us=sum(price.high_us * node.repeat for node, price in priced),
    )
    whole, host_us = hosts.compose(total, measured.step, num_kernels)
    shares: dict[str, float] = defaultdict(float)
    for node, price in priced:
        share = price.latency_us * node.repeat / max(total.latency_us, 1e-9)
        shares[price.provenance.name.lower()] += share
    return StepComparison(
        measured=measured,
        predicted_us=whole.latency_us,
        low_us=whole.low_us,
        high_us=whole.high_us,
        operators_us=total.latency_us,
        host_us=host_us,
        num_kernels=num_kernels,
        shares=dict(shares),
        parts=_parts(priced),
    )


def _parts(priced: Sequence[tuple[OperatorNode, Price]]) -> tuple[StepPart, ...]:
    """Return what operators of one kind take together, the most first."""
    found: dict[str, StepPart] = {}
    for node, price in priced:
        phase = " backward" if node.phase.name == "BACKWARD" else ""
        name = f"{node.operator}{phase}"
        taken_us = price.latency_us * node.repeat
        part = found.get(name)
        if part is None:
            found[name] = StepPart(
                name=name,
                num_calls=node.repeat,
                latency_us=taken_us,
                provenance=price.provenance,
            )
            continue
        # The weakest ground is the one to know of.
        weakest = max(part.provenance, price.provenance, key=_weakness)
        found[name] = replace(
            part,
            num_calls=part.num_calls + node.repeat,
            latency_us=part.latency_us + taken_us,
            provenance=weakest,
        )
    return tuple(sorted(found.values(), key=lambda part: -part.latency_us))


def _weakness(provenance: Provenance) -> int:
    return list(Provenance).index(provenance)


def calls_of_steps(reports: Sequence[ClosureReport]) -> tuple[OperatorCall, ...]:
    """Return every operator call that the steps of reports consist of, once.

    Timed, they tell how well steps are composed of operators, without any model between.

    Raises:
        InvalidRequestError: a report does not say what model it is of.

    """
    calls: dict[tuple[object, ...], OperatorCall] = {}
    for report in reports:
        for node in (node for item in report.steps for node in _lower(report, item.step)):
            call = node.call
            key = (call.operator, call.dtype, call.phase, call.variant, *sorted(call.dims.items()))
            calls.setdefault(key, call)
    return tuple(calls.values())


def describe_shares(step: StepComparison) -> str:
    """Return what a step's operators rest on, in per cent, the most first."""
    ordered = sorted(step.shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{share:.0%} {name}" for name, share in ordered)
