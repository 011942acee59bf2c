"""Profile the share of one tensor-parallel rank: build it, trace it, time its calls by size."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from foretoken.domain.errors import DeviceMemoryError
from foretoken.domain.measurements.estimate import OperatorCall, Phase
from foretoken.domain.measurements.profiling import GraphRequest
from foretoken.domain.measurements.training_truth import ModuleTime, ModuleTimes
from foretoken.domain.units import US_PER_MS
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.graph.call_operator import kernel_name, operator_calls
from foretoken.profiler.graph.call_timing import CallTimer, CallTimes, PassTime
from foretoken.profiler.graph.model import (
    ModelShape,
    count_layers,
    layer_kinds,
    outline_model,
    place_model,
    weight_bytes,
)
from foretoken.profiler.graph.module_fold import (
    ModuleSums,
    add_missing_layers,
    fold_calls,
    module_times,
)
from foretoken.profiler.graph.tensor_split import SplitError
from foretoken.profiler.graph.trace import Trace, TracedCall, TraceError, find_integers, trace_model
from foretoken.profiler.graph.whole_pass import (
    MemoryLimit,
    WholePass,
    memory_reason,
    pass_bytes,
    time_whole_pass,
)
from foretoken.profiler.kernel import TORCH_DTYPES, TensorFactory
from foretoken.profiler.recording.batches import BatchWriter, RowBuilder, reading_columns
from foretoken.profiler.timing.case import Rig
from foretoken.profiler.timing.plausibility import implausible_flags, physical_limits

# How many layers are tried in place of a model that does not fit.
_FEWER_LAYERS = (8, 4, 2, 1)
# What a clock can tell. A backward pass of no time would stand for one that was not measured, which
# simulations take for twice the forward pass.
_LEAST_US = 1e-3


@dataclass(kw_only=True, slots=True)
class GraphSession:
    """What the profiles of one request share, and what came of them so far."""

    request: GraphRequest
    config: Any
    rig: Rig
    memory: MemoryLimit
    rows: RowBuilder
    writer: BatchWriter
    progress: JobProgress
    notes: list[str]
    num_layers_timed: int = 0
    num_calls: int = 0
    start_s: float = field(default_factory=time.monotonic)

    @property
    def is_time_up(self) -> bool:
        """Whether the time cap is reached."""
        cap_s = self.request.time_cap_s
        return 0.0 < cap_s <= time.monotonic() - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """A model that is built: some of its layers, for one of `num_ranks` ranks.

    `layer_kinds` are those of all layers where some were left out, else none.
    """

    model: nn.Module
    num_layers: int
    num_ranks: int
    layer_kinds: tuple[object, ...] = ()


class _TimeIsUpError(Exception):
    """The time cap is reached in the middle of a size."""


class RankProfiler:
    """Profiles the shapes of one rank after the other; calls they share are timed once."""

    def __init__(self, session: GraphSession) -> None:
        """Profile as `session` says, and leave there what came of it."""
        self._session = session
        request, rig = session.request, session.rig
        self._dtype = TORCH_DTYPES[request.dtype]
        self._tensors = TensorFactory(rig.device.torch_device, self._dtype, request.seed)
        self._timer = CallTimer(rig, self._tensors, has_backward=request.has_backward)
        self._limits = physical_limits(rig.device_spec, request.dtype, rig.num_threads)
        self._times: dict[object, CallTimes] = {}
        self._sums_us: dict[object, float] = {}
        self._entry_us: float | None = None

    def profile(self, num_ranks: int, span: tuple[float, float]) -> ModuleTimes | None:
        """Return the times of a rank's modules, None where there are none; the notes say why.

        `span` is the part of the job's progress that this is.
        """
        session, request = self._session, self._session.request
        for num_layers in self._layer_choices():
            # What is made on one stream and read on another would need waiting for.
            with torch.cuda.stream(session.rig.stream):
                times, reason = self._try_layers(num_layers, num_ranks, span)
            if times:
                session.num_layers_timed = max(session.num_layers_timed, num_layers)
                return ModuleTimes(
                    source=f"graph of {request.model}",
                    model=request.model,
                    device=session.rig.device.name,
                    tp=num_ranks,
                    sequence_length=request.sequence_length,
                    dtype=request.dtype,
                    measures="intervals",
                    times=tuple(times),
                )
            session.notes.append(f"tp {num_ranks}, {num_layers} layers: {reason}")
            if not reason.startswith("out of memory"):
                return None
        return None

    def _layer_choices(self) -> list[int]:
        first = self._session.request.num_layers or count_layers(self._session.config)
        return [first, *(fewer for fewer in _FEWER_LAYERS if fewer < first)]

    def _try_layers(
        self, num_layers: int, num_ranks: int, span: tuple[float, float]
    ) -> tuple[list[ModuleTime], str]:
        """Return the times with that many layers, or none and why."""
        try:
            share = self._build(num_layers, num_ranks)
            return self._sweep(share, span)
        except SplitError as err:
            return [], f"not split: {err}"
        except (DeviceMemoryError, RuntimeError) as err:
            reason = memory_reason(err)
            if not reason:
                raise
        self._session.memory.recover()
        return [], reason

    def _build(self, num_layers: int, num_ranks: int) -> _Share:
        session = self._session
        shape = ModelShape(
            config=session.config, num_layers=num_layers, num_ranks=num_ranks, dtype=self._dtype
        )
        model = outline_model(shape, session.request.model)
        held = weight_bytes(model) * (2 if session.request.has_backward else 1)
        what = "weights and gradients" if session.request.has_backward else "weights"
        session.memory.check(held, f"{num_layers} layers' {what}")
        kinds = self._kinds_of_missing_layers(shape)
        return _Share(
            model=place_model(model, self._tensors),
            num_layers=num_layers,
            num_ranks=num_ranks,
            layer_kinds=kinds,
        )

    def _kinds_of_missing_layers(self, shape: ModelShape) -> tuple[object, ...]:
        """Return the kinds of all layers where some are left out, and note that they are."""
        num_all = count_layers(self._session.config)
        if shape.num_layers == num_all:
            return ()
        whole = outline_model(replace(shape, num_layers=num_all), self._session.request.model)
        kinds = layer_kinds(whole)
        missing = set(kinds[shape.num_layers :]) - set(kinds[: shape.num_layers])
        self._session.notes.append(
            f"{shape.num_layers} of {num_all} layers were built; the others are taken to be like"
            " those of their kind"
        )
        if missing:
            self._session.notes.append(
                f"{len(missing)} kinds of layers are not among the first {shape.num_layers}:"
                " these were not timed"
            )
        return kinds

    def _sweep(self, share: _Share, span: tuple[float, float]) -> tuple[list[ModuleTime], str]:
        """Return the times of micro batches of 1, 2, 4, ... samples until one does not fit."""
        session = self._session
        sizes = [*_powers_of_two(session.request.micro_batch_size_max)]
        found: list[ModuleTime] = []
        for place, size in enumerate(sizes):
            step = (span[1] - span[0]) / len(sizes)
            part = (span[0] + place * step, span[0] + (place + 1) * step)
            reason = self._try_size(share, size, part, found)
            if reason:
                if not found:
                    return [], reason
                session.notes.append(
                    f"tp {share.num_ranks}: the sweep ends before micro batches of {size}: {reason}"
                )
                break
        return found, ""

    def _try_size(
        self, share: _Share, size: int, span: tuple[float, float], found: list[ModuleTime]
    ) -> str:
        """Add the times of a micro batch size to `found`; return why there are none."""
        session = self._session
        try:
            found += self._profile_size(share, size, span)
        except _TimeIsUpError:
            return "the time is up"
        except TraceError as err:
            return f"not traced: {err}"
        except (DeviceMemoryError, RuntimeError) as err:
            reason = memory_reason(err)
            if not reason:
                raise
        else:
            return ""
        session.memory.recover()
        return reason

    def _profile_size(
        self, share: _Share, size: int, span: tuple[float, float]
    ) -> list[ModuleTime]:
        session, request = self._session, self._session.request
        name = f"tp {share.num_ranks}, micro batch {size}"
        session.progress.update(span[0], f"{name}: tracing")
        vocab = int(share.model.get_input_embeddings().weight.shape[0])
        token_ids = self._tensors.integers(vocab, size, request.sequence_length)
        trace = trace_model(share.model, token_ids)
        session.memory.check_activations(
            pass_bytes(trace, has_backward=request.has_backward),
            f"a pass of {share.num_layers} layers with micro batch {size}",
        )
        session.progress.update(span[0], f"{name}: timing whole passes")
        gradients_from = self._tensors if request.has_backward else None
        whole = time_whole_pass(share.model, token_ids, session.rig, gradients_from)
        self._time_calls(trace, token_ids, (name, span))
        session.num_calls = max(session.num_calls, len(trace.calls))
        sums = fold_calls(trace.calls, self._times_of)
        session.notes.append(_closure_note(name, share, sums, whole))
        sums = add_missing_layers(sums, share.layer_kinds)
        return list(module_times(sums, size, is_split=share.num_ranks > 1))

    def _time_calls(
        self, trace: Trace, token_ids: torch.Tensor, part: tuple[str, tuple[float, float]]
    ) -> None:
        """Time the calls that are not known yet, and record those that are operators."""
        session, (name, span) = self._session, part
        integers = find_integers(trace, token_ids)
        calls: dict[object, TracedCall] = {}
        for call in trace.calls:
            calls.setdefault(call.key, call)
        if self._entry_us is None:
            self._entry_us = self._timer.time_entry_us()
        for place, (key, call) in enumerate(calls.items()):
            ratio = span[0] + (span[1] - span[0]) * place / len(calls)
            session.progress.update(ratio, f"{name}: call {place + 1} of {len(calls)}")
            if session.is_time_up:
                raise _TimeIsUpError
            if key not in self._times:
                self._times[key] = self._time_call(call, integers.get(call.name, ()))
        for call in trace.calls:
            if session.request.has_backward and call.num_readers > 1:
                self._learn_sum(call)

    def _time_call(self, call: TracedCall, integers: tuple[torch.Tensor, ...]) -> CallTimes:
        session = self._session
        operators = operator_calls(call, session.request.dtype)
        try:
            times = self._timer.time(call, integers)
        except (DeviceMemoryError, RuntimeError) as err:
            reason = memory_reason(err)
            self._record_failure(operators, call, reason or f"{type(err).__name__}: {err}")
            if reason:
                raise
            line = (str(err).splitlines() or [""])[0]
            session.notes.append(
                f"{call.target} in {call.module} does not run alone, its time lacks: {line}"
            )
            return {}
        for phase, operator in operators.items():
            if phase in times:
                self._record(operator, call, times[phase])
        return times

    def _learn_sum(self, call: TracedCall) -> None:
        shape = call.outputs[0]
        if shape.key not in self._sums_us:
            self._sums_us[shape.key] = self._timer.time_sum_us(shape)

    def _times_of(self, call: TracedCall) -> tuple[float, float]:
        """Return µs of a call forward and backward, there with the sums of its gradients."""
        times = self._times[call.key]
        forward, backward = (times.get(phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
        backward_us = 0.0
        if backward is not None:
            entry_us = self._entry_us or 0.0
            backward_us = max(_LEAST_US, backward.summary.latency_us_median - entry_us)
        if self._session.request.has_backward and call.num_readers > 1:
            backward_us += (call.num_readers - 1) * self._sums_us[call.outputs[0].key]
        return forward.summary.latency_us_median if forward else 0.0, backward_us

    def _record(self, operator: OperatorCall, call: TracedCall, timed: PassTime) -> None:
        session = self._session
        if not timed.does_work:
            return
        latency_us = timed.summary.latency_us_median
        flags = [
            *implausible_flags(operator, latency_us, self._limits, session.rig.cache_bytes),
            *timed.seen.flags,
        ]
        row = session.rows.measured(
            operator,
            kernel_name(call),
            timed.summary,
            model=session.request.model,
            kernel_name=timed.kernel_name or None,
            **reading_columns(timed.seen.reading),
        )
        now_s = time.monotonic()
        session.writer.add({**row, "flags": flags}, now_s)
        session.writer.confirm(now_s)

    def _record_failure(
        self, operators: dict[Phase, OperatorCall], call: TracedCall, reason: str
    ) -> None:
        session, now_s = self._session, time.monotonic()
        for operator in operators.values():
            row = session.rows.failed(
                operator, kernel_name(call), reason, model=session.request.model
            )
            session.writer.add(row, now_s)
        session.writer.confirm(now_s)


def _closure_note(name: str, share: _Share, sums: ModuleSums, whole: WholePass) -> str:
    forward_us = sum(found.forward_us for found in sums.values())
    backward_us = sum(found.backward_us for found in sums.values())
    forward = _compare(forward_us, whole.forward_us)
    text = f"{name}: calls of {share.num_layers} layers add up to {forward}"
    if whole.backward_us is not None:
        text += f" forward, {_compare(backward_us, whole.backward_us)} backward"
    return text


def _compare(sum_us: float, whole_us: float) -> str:
    difference = sum_us / whole_us - 1 if whole_us else 0.0
    return (
        f"{sum_us / US_PER_MS:.4g} ms of {whole_us / US_PER_MS:.4g} ms measured ({difference:+.1%})"
    )


def _powers_of_two(largest: int) -> Iterator[int]:
    size = 1
    while size <= largest:
        yield size
        size *= 2
