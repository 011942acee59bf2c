"""Time whole steps of a model and keep them as an artifact of the catalog, never as rows."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.domain.errors import CancelledJobError, ForetokenError, InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import (
    CLOSURE_KIND,
    DISTURBED_KEY,
    ClosureReport,
    ClosureRequest,
    ClosureStep,
    MeasuredStep,
)
from foretoken.domain.name import text_to_name
from foretoken.domain.ports import CatalogPort
from foretoken.domain.units import NS_PER_US
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.closure.hf_model import HuggingFaceModel, build_model, read_config
from foretoken.profiler.closure.step_program import Program, choose_steps, make_program
from foretoken.profiler.environment import describe_environment, free_memory_bytes
from foretoken.profiler.host.probe import host_clock
from foretoken.profiler.kernel import PLAIN_DTYPES, TORCH_DTYPES
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.recording.batch_sender import HandOver
from foretoken.profiler.report import ReportShelf
from foretoken.profiler.timing.timer import median_interval_ratio, summarize
from foretoken.profiler.timing.watch import Observation, open_watch

# Steps that are looked at: enough to even out, few as a profiler keeps every event.
_NUM_PROFILED = 3
# Operators that compute nothing, though their schema does not call them views.
_FREE_OPERATORS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::detach",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::lift_fresh",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::record_stream",
    }
)


class OperatorRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Keeps every operator that computes, with its arguments, in the order they are run."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and keep it."""
        named = dict(kwargs or {})
        if not is_free(func):
            self.calls.append((func, args, named))
        return func(*args, **named)


def is_free(operator: Any) -> bool:
    """Tell whether an operator launches nothing: a view, or memory without content."""
    name = operator._schema.name  # noqa: SLF001 - torch has no public name for it
    return operator.is_view or name in _FREE_OPERATORS or name.startswith("profiler::")


def profile_step(run: Callable[[], object], device: LocalDevice) -> tuple[float, int]:
    """Return the µs that kernels ran on the device for a step, and their number.

    A CPU does not tell times apart from wall time: 0, and the operators that compute.
    """
    if not device.is_cuda:
        with OperatorRecorder() as recorder:
            run()
        return 0.0, len(recorder.calls)
    torch.cuda.synchronize(device.torch_device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_NUM_PROFILED):
            run()
        torch.cuda.synchronize(device.torch_device)
    on_device = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        # Ranges that programs name are drawn on the device, too.
        and not getattr(event, "is_user_annotation", False)
    ]
    busy_us = sum(event.time_range.elapsed_us() for event in on_device)
    return busy_us / _NUM_PROFILED, round(len(on_device) / _NUM_PROFILED)


_LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class _Patience:
    """How often a step is repeated: until the median is known well enough, or this long."""

    num_warm_ups: int
    least_samples: int
    interval_ratio: float
    longest_s: float


_FULL = _Patience(num_warm_ups=5, least_samples=20, interval_ratio=0.01, longest_s=10.0)
_QUICK = _Patience(num_warm_ups=2, least_samples=7, interval_ratio=0.02, longest_s=2.0)
# A step that takes longer than all the patience there is still needs samples for a spread.
_FEWEST_SAMPLES = 3


def measure_closure(
    request: ClosureRequest,
    device: LocalDevice,
    catalog: CatalogPort,
    progress: JobProgress,
    *,
    num_threads: int,
    hand_over: HandOver | None = None,
) -> ClosureReport:
    """Time the steps of a request one after the other; one that fails is a step with a reason.

    What is measured is stored, also when the job is cancelled half way. A catalog that is away is
    waited for as `hand_over` says, by a cancelled job not at all.

    Raises:
        InvalidRequestError: the model cannot be built from its configuration.
        CancelledJobError: cancelled.
        ForetokenError: the catalog refused the report, or stayed away.

    """
    start_s = time.monotonic()
    _check_dtype(request.dtype)
    # A thread of its own has torch's default number until it is set.
    torch.set_num_threads(num_threads)
    if device.is_cuda:
        # Graphs are captured on the current device.
        torch.cuda.set_device(device.torch_device)
    # Before the model is there: what a step takes counts its weights.
    free_bytes = free_memory_bytes(device)
    progress.update(0.0, f"build {request.model}")
    content = read_config(request.config_json, request.model, request.num_layers)
    model = build_model(content, request.model, TORCH_DTYPES[request.dtype], device.torch_device)
    steps = request.steps or choose_steps(
        model.architecture,
        request.dtype,
        free_bytes,
        is_cuda=device.is_cuda,
        is_quick=request.quick,
    )
    bench = _Bench(model, device, _QUICK if request.quick else _FULL, request.seed)
    measured: list[MeasuredStep] = []
    report = _describe(request, model, device)
    try:
        for step in _within(steps, request.time_cap_s, start_s, measured):
            progress.update(len(measured) / len(steps), describe_step(step))
            measured.append(bench.measure(step))
    finally:
        environment = {**report.environment, DISTURBED_KEY: "; ".join(bench.flags_of_steps)}
        report = replace(
            report,
            steps=tuple(measured),
            environment=environment,
            wall_s=time.monotonic() - start_s,
        )
        if measured:
            shelf = ReportShelf(
                catalog=catalog, kind=CLOSURE_KIND, hand_over=hand_over or HandOver()
            )
            _keep(report, shelf, progress)
    return report


def _check_dtype(dtype: DType) -> None:
    if dtype not in PLAIN_DTYPES:
        names = ", ".join(sorted(plain.name.lower() for plain in PLAIN_DTYPES))
        raise InvalidRequestError.of_field("dtype", f"whole steps run in {names}")


def _keep(report: ClosureReport, shelf: ReportShelf, progress: JobProgress) -> None:
    facts = {"model": report.model, "device": report.device}
    # Whoever cancelled does not wait: the first word of it raises.
    shelf.keep(report.name, report, facts, lambda text: progress.update(1.0, text))


def describe_step(step: ClosureStep) -> str:
    """Return a step as commands name it: `prefill:1x512:eager`."""
    return f"{step.kind}:{step.batch_size}x{step.num_tokens}:{step.mode}"


def _within(
    steps: Sequence[ClosureStep], cap_s: float, start_s: float, measured: list[MeasuredStep]
) -> Iterator[ClosureStep]:
    """Yield the steps that the time cap leaves room for; the others are failed ones."""
    for step in steps:
        if cap_s and time.monotonic() - start_s >= cap_s:
            measured.append(_failed(step, f"left out: the cap of {cap_s:g} s was reached"))
        else:
            yield step


class _Bench:
    """Times steps of one model."""

    def __init__(
        self, model: HuggingFaceModel, device: LocalDevice, patience: _Patience, seed: int
    ) -> None:
        self._model = model
        self._device = device
        self._patience = patience
        self._seed = seed
        self._watch = open_watch(device, torch.get_num_threads())
        self.flags_of_steps: list[str] = []

    def measure(self, step: ClosureStep) -> MeasuredStep:
        """Return a step as it was timed, or failed with the reason."""
        self._free()
        try:
            return self._time(step)
        except CancelledJobError:
            raise
        except ForetokenError as err:
            return _failed(step, err.message)
        except Exception as err:  # noqa: BLE001
            # Compilers, allocators and models raise whatever they like; the next step may work.
            return _failed(step, _reason(err))
        finally:
            self._model.module.zero_grad(set_to_none=True)
            self._free()

    def _time(self, step: ClosureStep) -> MeasuredStep:
        device = self._device.torch_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        run = make_program(self._model, step, device, self._seed)
        samples_us, host_us, seen = self._sample(run)
        if seen.is_disturbed:
            # As operators are: once more, and the quieter time counts.
            again = self._sample(run)
            if again[2].waited_ratio < seen.waited_ratio:
                samples_us, host_us, seen = again
        self.flags_of_steps += [f"{describe_step(step)} {flag}" for flag in seen.flags]
        memory_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        summary = summarize(samples_us)
        device_us, num_kernels = 0.0, 0
        # On a CPU, what is compiled tells nothing of its kernels.
        if self._device.is_cuda or step.mode == "eager":
            device_us, num_kernels = profile_step(run, self._device)
        return MeasuredStep(
            step=step,
            latency_us_median=summary.latency_us_median,
            latency_us_p10=summary.latency_us_p10,
            latency_us_p90=summary.latency_us_p90,
            num_samples=summary.num_samples,
            device_us=device_us,
            # A CPU queues nothing: the host is the device.
            host_us=summarize(host_us).latency_us_median if device.type == "cuda" else 0.0,
            num_kernels=num_kernels,
            memory_bytes=float(memory_bytes),
        )

    def _sample(self, run: Program) -> tuple[list[float], list[float], Observation]:
        """Return times of the step, the parts of them until all was queued, and what was seen."""
        patience, clock_ns = self._patience, host_clock(self._device)
        for _ in range(patience.num_warm_ups):
            run()
        walls_us: list[float] = []
        hosts_us: list[float] = []
        begin_s = time.monotonic()
        self._watch.start()
        with _without_collector():
            while not _is_enough(walls_us, time.monotonic() - begin_s, patience):
                self._synchronize()
                start_ns = clock_ns()
                run()
                queued_ns = clock_ns()
                self._synchronize()
                walls_us.append((clock_ns() - start_ns) / NS_PER_US)
                hosts_us.append((queued_ns - start_ns) / NS_PER_US)
        return walls_us, hosts_us, self._watch.finish()

    def _synchronize(self) -> None:
        if self._device.is_cuda:
            torch.cuda.synchronize(self._device.torch_device)

    def _free(self) -> None:
        gc.collect()
        if self._device.is_cuda:
            torch.cuda.empty_cache()


def _is_enough(samples_us: Sequence[float], elapsed_s: float, patience: _Patience) -> bool:
    if len(samples_us) < _FEWEST_SAMPLES:
        return False
    if elapsed_s >= patience.longest_s:
        return True
    if len(samples_us) < patience.least_samples:
        return False
    return median_interval_ratio(samples_us) <= patience.interval_ratio


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep Python's cycle collector from running in the middle of a step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _describe(
    request: ClosureRequest, model: HuggingFaceModel, device: LocalDevice
) -> ClosureReport:
    now = datetime.now(tz=UTC)
    facts = model.facts
    return ClosureReport(
        name=f"{text_to_name(request.model)}-{device.name}-{now:%Y%m%dT%H%M%S%f}"[:-3],
        device=device.name,
        model=request.model,
        architecture=model.architecture,
        dtype=request.dtype,
        framework=f"transformers {facts['transformers']}",
        environment={
            **describe_environment(device),
            **facts,
            "clock": host_clock(device).__name__,
            "seed": str(request.seed),
        },
        created_at=now.isoformat(timespec="milliseconds"),
    )


def _failed(step: ClosureStep, reason: str) -> MeasuredStep:
    return MeasuredStep(step=step, status="failed", reason=reason[:_LONGEST_REASON])


def _reason(err: Exception) -> str:
    text = " ".join(str(err).split())
    if isinstance(err, torch.OutOfMemoryError) or "allocate memory" in text:
        return f"out of memory: {text}"
    return f"{type(err).__name__}: {text}"
