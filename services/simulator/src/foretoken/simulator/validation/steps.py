"""Whole steps of a model as measured, compared with what operators alone make of them.

Nothing is fitted: a step is the sum of its operators' estimates, and of what the host takes as
`foretoken profile host` measures it on small models. On a CPU the host is the device: what a model
takes in addition to its operators is added. On a GPU both run at the same time, and the slower
decides; a graph is launched once and replayed.

Kernels are those that `transformers` launches operator by operator, counted in its source and
PyTorch's, and seen with a dispatch mode: llama, qwen3 and gpt2 in transformers 5.23. On a GPU some
operators are two kernels, which the count leaves out.
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
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorCall,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.measurements.profiling import (
    DISTURBED_KEY,
    ClosureReport,
    ClosureStep,
    MeasuredStep,
)
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.spec.variant import EAGER_VARIANT
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import ceil_divide
from foretoken.simulator.steps.error_parts import NUM_CASES, bound_cases
from foretoken.simulator.training.operator_prices import OperatorPrices, Price, fetch_prices

_OPERATOR = "launch_gap"
_OWN = (Provenance.MEASURED, Provenance.INTERPOLATED, Provenance.EXTRAPOLATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTime:
    """A time in µs with its bounds."""

    latency_us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0

    def plus(self, other: "HostTime") -> "HostTime":
        """Return both one after the other."""
        return HostTime(
            latency_us=self.latency_us + other.latency_us,
            low_us=self.low_us + other.low_us,
            high_us=self.high_us + other.high_us,
        )

    def overlapped_with(self, other: "HostTime") -> "HostTime":
        """Return both at the same time."""
        return HostTime(
            latency_us=max(self.latency_us, other.latency_us),
            low_us=max(self.low_us, other.low_us),
            high_us=max(self.high_us, other.high_us),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTimes:
    """Host times by part and number of kernels; a part that was not measured here has none."""

    is_cpu: bool
    by_part: Mapping[tuple[str, int], HostTime]
    notes: tuple[str, ...] = ()

    def compose(
        self, operators: HostTime, step: ClosureStep, num_kernels: int
    ) -> tuple[HostTime, float]:
        """Return the time of a step, and the host's part of it in µs."""
        none = HostTime()

        def find(part: str) -> HostTime:
            return self.by_part.get((part, num_kernels), none)

        if step.mode == "compiled":
            return operators, 0.0
        if step.mode == "graph":
            launch = find("launch_graph")
            return operators.overlapped_with(find("replay")).plus(launch), launch.latency_us
        suffix = _suffix(step)
        model = find(f"model_{suffix}")
        if not self.is_cpu:
            return operators.overlapped_with(model), model.latency_us
        alone = find(f"operators_{suffix}")
        gap_us = max(0.0, model.latency_us - alone.latency_us)
        # Both were measured side by side, so what disturbs one disturbs the other.
        gap = HostTime(latency_us=gap_us, low_us=gap_us, high_us=gap_us)
        return operators.plus(gap), gap_us


def fetch_host_times(
    steps: Sequence[tuple[ClosureStep, int]], device: str, dtype: DType, predictor: PredictorPort
) -> HostTimes:
    """Return the host times of steps of that many kernels, in one query."""
    is_cpu = find_device(device).kind == "cpu"
    wanted = sorted({(part, count) for step, count in steps for part in _parts_of(step, is_cpu)})
    notes = []
    if any(step.mode == "compiled" for step, _ in steps):
        notes.append("the host's part of compiled steps is not modelled: device time alone")
    if not wanted:
        return HostTimes(is_cpu=is_cpu, by_part={}, notes=tuple(notes))
    tables = tuple(
        OperatorTable(
            operator=_OPERATOR,
            dtype=dtype,
            columns={"num_kernels": [count]},
            variant=f"part={part}",
        )
        for part, count in wanted
    )
    reply = predictor.predict(LatencyQuery(device=device, tables=tables))
    answers = zip(wanted, reply.tables, strict=True)
    known = {key: _time(columns) for key, columns in answers if _is_own(columns, key[0])}
    missing = sorted({part for part, count in wanted if (part, count) not in known})
    if missing:
        notes.append(
            f"host times not measured on {device}: {', '.join(missing)}; run"
            f" `foretoken profile host --device {device}`, then `foretoken train`"
        )
    return HostTimes(is_cpu=is_cpu, by_part=known, notes=tuple(notes))


def _suffix(step: ClosureStep) -> str:
    return "training" if step.kind == "training" else "eager"


def _parts_of(step: ClosureStep, is_cpu: bool) -> tuple[str, ...]:
    if step.mode == "compiled":
        return ()
    if step.mode == "graph":
        return ("launch_graph", "replay")
    suffix = _suffix(step)
    return (f"model_{suffix}", f"operators_{suffix}") if is_cpu else (f"model_{suffix}",)


def _is_own(columns: LatencyColumns, part: str) -> bool:
    """Whether the host of this device was timed in this very way."""
    return Provenance(int(columns.provenance[0])) in _OWN and f"part={part}" in columns.basis


def _time(columns: LatencyColumns) -> HostTime:
    return HostTime(
        latency_us=float(columns.latency_us[0]),
        low_us=float(columns.low_us[0]),
        high_us=float(columns.high_us[0]),
    )


@dataclass(frozen=True, slots=True)
class _Count:
    """Kernels of a pass of an operator, and how many more convert between 16 bit and fp32."""

    forward: int = 1
    backward: int = 1
    conversions: int = 0


# Kernels that convert in a chain.
_CHAIN_CONVERSIONS = {"rms_norm": 2}
_COUNTS: Mapping[str, _Count] = {
    "cross_entropy": _Count(forward=4, backward=3, conversions=1),
    "kv_cache_write": _Count(forward=2),
    "product": _Count(backward=2),
}
# Positions, and with rotary embedding their angles, sines and cosines.
_NUM_POSITION_KERNELS = {"learned": 2, "rope": 9}
_NUM_ANGLE_CONVERSIONS = 2
# Before training, transformers looks whether several sequences share a row.
_NUM_PACKING_KERNELS = 8
# A launch of a fused optimizer takes this many tensors and elements, and one counts the steps.
# Source: PyTorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh (four lists of tensors: 36
# tensors, 320 blocks of 65,536 elements).
_TENSORS_PER_LAUNCH = 36
_ELEMENTS_PER_LAUNCH = 320 * 65536


def count_kernels(nodes: Nodes, step: ClosureStep, model: ModelArchitecture, dtype: DType) -> int:
    """Return the kernels of a step that consists of these operators."""
    is_narrow = dtype is not DType.FP32
    count = _NUM_POSITION_KERNELS[model.position]
    if model.position == "rope" and is_narrow:
        count += _NUM_ANGLE_CONVERSIONS
    if step.kind == "training":
        count += _NUM_PACKING_KERNELS
    return count + sum(node.repeat * _of_node(node, is_narrow=is_narrow) for node in nodes)


def _of_node(node: OperatorNode, *, is_narrow: bool) -> int:
    if node.operator == "fused_adam":
        by_tensors = ceil_divide(node.dims["num_tensors"], _TENSORS_PER_LAUNCH)
        by_elements = ceil_divide(node.dims["num_params"], _ELEMENTS_PER_LAUNCH)
        return 1 + max(int(by_tensors), int(by_elements))
    count = _COUNTS.get(node.operator, _Count())
    if node.variant == EAGER_VARIANT:
        conversions = _CHAIN_CONVERSIONS.get(node.operator, 0)
        count = _Count(*node.num_kernels, conversions=conversions)
    kernels = count.forward if node.phase is Phase.FORWARD else count.backward
    return kernels + (count.conversions if is_narrow else 0)


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
    none_us = np.zeros(NUM_CASES)
    cases_us = sum((price.cases_us * node.repeat for node, price in priced), none_us)
    low_us, high_us = bound_cases(cases_us)
    total = HostTime(latency_us=float(cases_us[0]), low_us=low_us, high_us=high_us)
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
