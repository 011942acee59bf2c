"""What the host takes for a step, as measured on small models, and how it joins the operators.

On a CPU the host is the device: what a model takes beside its operators is added. On a GPU both run
at the same time, and the slower decides; a graph is launched once and replayed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.ports import PredictorPort

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

    def beside(self, other: "HostTime") -> "HostTime":
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
            return operators.beside(find("replay")).plus(launch), launch.latency_us
        suffix = _suffix(step)
        model = find(f"model_{suffix}")
        if not self.is_cpu:
            return operators.beside(model), model.latency_us
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
