"""Time the host and record it as rows of `launch_gap` and `host_step`."""

import importlib.util
import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.ports import CatalogPort
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.environment import FRAMEWORK, describe_environment, framework_version
from foretoken.profiler.host.probe import HostProbe, launch_probes, sample_probe
from foretoken.profiler.host.serving_step import model_probes, serving_probes
from foretoken.profiler.kernel import TORCH_DTYPES
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.recording.batches import RowBuilder, reading_columns
from foretoken.profiler.recording.spool import Row
from foretoken.profiler.timing.watch import DeviceWatch, open_watch
from foretoken.wire.arrow import rows_to_table

TOOL = "foretoken profiler"
_LONGEST_S, _QUICK_LONGEST_S = 1.5, 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPart:
    """Times of one part in µs: of its `largest` number of kernels or sequences, and of each more.

    `slope_us` is the difference between the largest and the smallest number, over their distance.
    """

    operator: str
    part: str
    largest: int
    latency_us: float
    slope_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """What was timed on the host; `notes` say what was not, and why."""

    run_id: str
    device: str
    num_rows: int
    num_flagged: int
    wall_s: float
    parts: tuple[HostPart, ...]
    notes: tuple[str, ...]


def measure_host(
    device: LocalDevice,
    catalog: CatalogPort,
    progress: JobProgress,
    *,
    quick: bool,
    num_threads: int,
) -> HostReport:
    """Time launches, small models and what a serving step does in addition; record rows.

    `num_threads` are torch's on a CPU (0: one fewer than it would take, as for operators).

    Raises:
        InvalidRequestError: the package transformers is not installed.
        CancelledJobError: cancelled; nothing is recorded.

    """
    start_s = time.monotonic()
    torch.set_num_threads(num_threads or max(1, torch.get_num_threads() - 1))
    if device.is_cuda:
        # Graphs are captured on the current device.
        torch.cuda.set_device(device.torch_device)
    dtype = DType.BF16 if device.is_cuda else DType.FP32
    longest_s = _QUICK_LONGEST_S if quick else _LONGEST_S
    builder = RowBuilder(device.name, FRAMEWORK, framework_version())
    watch = open_watch(device, torch.get_num_threads())
    rows: list[Row] = []
    for done, probe in enumerate(_probes(device, TORCH_DTYPES[dtype], quick=quick)):
        # The number of probes is not known before the last: the share tells that it goes on.
        progress.update(done / (done + 4), f"{probe.operator} {dict(probe.dims)}")
        rows += _rows_of(probe, dtype, builder, watch, longest_s)
    run = Run(
        run_id=f"host-{device.name}-{uuid.uuid4().hex[:12]}",
        kind=RunKind.PROFILE,
        tool=TOOL,
        source=device.vendor_name or device.name,
        environment=describe_environment(device),
    )
    batch = MeasurementBatch(batch_index=0, rows=rows_to_table(rows), is_last=True)
    list(catalog.record(run, (batch,)))
    return HostReport(
        run_id=run.run_id,
        device=device.name,
        num_rows=len(rows),
        num_flagged=sum(bool(row["flags"]) for row in rows),
        wall_s=time.monotonic() - start_s,
        parts=_summarize(rows),
        notes=_notes(),
    )


def _probes(device: LocalDevice, dtype: torch.dtype, *, quick: bool) -> Iterator[HostProbe]:
    return itertools.chain(
        launch_probes(device, quick=quick),
        model_probes(device, dtype, quick=quick),
        serving_probes(device, quick=quick),
    )


def _rows_of(
    probe: HostProbe, dtype: DType, builder: RowBuilder, watch: DeviceWatch, longest_s: float
) -> Iterator[Row]:
    watch.start()
    found = sample_probe(probe, longest_s)
    seen = watch.finish()
    for part, summary in found.items():
        call = OperatorCall(
            operator=probe.operator, dtype=dtype, dims=dict(probe.dims), variant=f"part={part}"
        )
        yield builder.measured(
            call,
            probe.kernel,
            summary,
            flags=list(seen.flags),
            **reading_columns(seen.reading),
        )


def _summarize(rows: Sequence[Row]) -> tuple[HostPart, ...]:
    """Return each part at its largest number, and what each more takes."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        size = next(iter(row["dims"].values()))
        points = series.setdefault((row["operator"], row["variant"]), {})
        points[size] = row["latency_us_median"]
    return tuple(
        _part(operator, variant.removeprefix("part="), points)
        for (operator, variant), points in series.items()
    )


def _part(operator: str, part: str, points: dict[int, float]) -> HostPart:
    sizes = sorted(points)
    largest, before = sizes[-1], sizes[0]
    slope_us = (points[largest] - points[before]) / max(largest - before, 1)
    return HostPart(
        operator=operator,
        part=part,
        largest=largest,
        latency_us=points[largest],
        slope_us=slope_us,
    )


def _notes() -> tuple[str, ...]:
    notes = []
    if importlib.util.find_spec("tokenizers") is None:
        notes.append("detokenizing was not measured: the package tokenizers is not installed")
    has_vllm = importlib.util.find_spec("vllm") is not None
    reason = "its scheduler cannot be driven from here yet" if has_vllm else "it is not installed"
    notes.append(f"the scheduler of vLLM was not measured: {reason}")
    return tuple(notes)
