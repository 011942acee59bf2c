"""Find out which kernel a call really ran: torch's profiler around one more call.

The first calls of each kind (operator, kernel, variant, number format, phase) are looked up, others
while looking up has taken less than a share of the time since the start: a quarter on a GPU, whose
libraries pick kernels by shape, so that usually each call is. On a CPU names are those of torch's
operators, which shapes seldom change: what was not looked up has the name that all looked up of its
kind have, and none where they differ.
"""

import contextlib
import hashlib
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.autograd.profiler import profile

_log = logging.getLogger(__name__)

# The profiler's C++ part prints a line to stderr at each start and stop below this level; it reads
# the variable when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

LONGEST_NAME = 200
_HASH_LENGTH = 8
# A kernel that takes less of a call's time than this is not counted.
_COUNTED_RATIO = 0.01
# Of the time since the start.
_CPU_SHARE_MAX, _CUDA_SHARE_MAX = 0.05, 0.25
# Calls of a kind that are looked up whatever it takes.
_NUM_FIRST = 2
# After so many failures nothing more is looked up.
_FAILURES_MAX = 3
# On a CPU a call is looked up twice, and up to so often while that takes less than this: where one
# has to wait for other processes, another shows what its operators take.
_NUM_CPU_CALLS, _REPEATING_MAX_S = 5, 0.05
# What autograd and the profiler do around operators, under names with the namespaces of operators.
_NO_OPERATORS = frozenset({"autograd", "torch", "profiler"})
# Of the namespaces that say nothing: torch's own, and those without a name.
_DROPPED = ("(anonymous namespace)::", "at::native::", "std::__cxx11::", "void ")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTrace:
    """The kernel of a call that took longest, and how many took a part of its time that counts.

    On a CPU these are torch's operators; time in others that they call is theirs.
    """

    name: str = ""
    num_kernels: int = 0


NOT_TRACED = KernelTrace()


def trace_kernels(
    call: Callable[[], object],
    device: torch.device,
    now_s: Callable[[], float] = time.perf_counter,
) -> KernelTrace:
    """Run a call under the profiler, on a CPU a few times; name nothing where it sees no kernel.

    Raises:
        RuntimeError: the call failed.

    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    # What `torch.profiler.profile` wraps, without the compiler that it imports for a second.
    with profile(
        use_kineto=True, use_cpu=not is_cuda, use_device="cuda" if is_cuda else None
    ) as profiler:
        num_calls = _call_on_device(call, device) if is_cuda else _call_on_cpu(call, now_s)
    times: dict[str, list[float]] = {}
    for event in profiler.function_events or ():
        is_on_device = event.device_type.name != "CPU"
        if is_on_device != is_cuda or getattr(event, "is_user_annotation", False):
            continue
        if is_on_device or _is_operator(event.name):
            own_us = event.time_range.elapsed_us() if is_on_device else event.self_cpu_time_total
            times.setdefault(event.name, []).append(float(own_us))
    return summarize_kernels(times, num_calls)


def _call_on_device(call: Callable[[], object], device: torch.device) -> int:
    call()
    torch.cuda.synchronize(device)
    return 1


def _call_on_cpu(call: Callable[[], object], now_s: Callable[[], float]) -> int:
    """Call until enough is seen; return how often that was."""
    start_s = now_s()
    call()
    for num_calls in range(2, _NUM_CPU_CALLS + 1):
        call()
        if now_s() - start_s > _REPEATING_MAX_S:
            return num_calls
    return _NUM_CPU_CALLS


def _is_operator(name: str) -> bool:
    """Return whether torch's dispatcher ran this: `aten::mm`, but not autograd's `MmBackward0`."""
    namespace, separator, _ = name.partition("::")
    return bool(separator) and namespace not in _NO_OPERATORS


def _of_quickest(times_us: list[float], num_calls: int) -> list[float]:
    """Return an operator's times in one call, each the shortest of all calls.

    Calls that did not all run it as often are taken as one.
    """
    num_times, rest = divmod(len(times_us), num_calls)
    if rest:
        return times_us
    return [min(times_us[place::num_times]) for place in range(num_times)]


def summarize_kernels(times_us: dict[str, list[float]], num_calls: int = 1) -> KernelTrace:
    """Return the trace of a call whose kernels ran for these µs at each launch, call after call."""
    if not times_us:
        return NOT_TRACED
    quickest = {name: _of_quickest(times, num_calls) for name, times in times_us.items()}
    total_us = sum(sum(times) for times in quickest.values())
    longest = max(quickest, key=lambda name: (sum(quickest[name]), name))
    return KernelTrace(
        name=shorten(longest),
        num_kernels=sum(
            own_us >= _COUNTED_RATIO * total_us for times in quickest.values() for own_us in times
        ),
    )


def shorten(name: str) -> str:
    """Return a kernel's name without what does not tell it apart from others.

    The parameter list, the return type, torch's namespaces and blanks go. What is still longer than
    `LONGEST_NAME` is cut and ends in a hash of the whole, so that different kernels keep different
    names.
    """
    plain = _without_parameters(name.strip())
    for dropped in _DROPPED:
        plain = plain.replace(dropped, "")
    plain = plain.replace(", ", ",").replace(" >", ">")
    if len(plain) <= LONGEST_NAME:
        return plain
    digest = hashlib.sha256(plain.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{plain[: LONGEST_NAME - _HASH_LENGTH - 1]}~{digest}"


@dataclass(slots=True)
class KernelNamer:
    """Looks up kernels' names within a share of the time since `open` (None: the device's usual).

    The same call is not looked up twice.
    """

    device: torch.device
    share_max: float | None = None
    now_s: Callable[[], float] = time.perf_counter
    num_traced: int = 0
    num_failed: int = 0
    _spent_s: float = 0.0
    _start_s: float = 0.0
    _kinds: defaultdict[Hashable, list[KernelTrace]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _traces: dict[Hashable, KernelTrace] = field(default_factory=dict)

    def open(self) -> None:
        """Start the profiler once: its first start takes longer, and is no case's."""
        with _silent_stderr():
            self._try(lambda: torch.ones(1, device=self.device))
        self._start_s = self.now_s()

    def trace(self, kind: Hashable, shape: Hashable, call: Callable[[], object]) -> KernelTrace:
        """Return what a call runs; `NOT_TRACED` where nobody can tell, or when looking failed."""
        key = (kind, shape)
        if key not in self._traces:
            if len(self._kinds[kind]) >= _NUM_FIRST and not self._has_time():
                return self._of_kind(kind)
            self._traces[key] = self._look_up(kind, call)
        return self._traces[key]

    def _of_kind(self, kind: Hashable) -> KernelTrace:
        names = {trace.name for trace in self._kinds[kind]}
        is_told = self.device.type == "cpu" and len(names) == 1
        return KernelTrace(name=names.pop()) if is_told else NOT_TRACED

    def _has_time(self) -> bool:
        usual = _CUDA_SHARE_MAX if self.device.type == "cuda" else _CPU_SHARE_MAX
        share_max = usual if self.share_max is None else self.share_max
        expected_s = self._spent_s / max(self.num_traced, 1)
        elapsed_s = self.now_s() - self._start_s
        return self._spent_s + expected_s <= share_max * elapsed_s

    def _look_up(self, kind: Hashable, call: Callable[[], object]) -> KernelTrace:
        start_s = self.now_s()
        try:
            trace = self._try(call)
            self._kinds[kind].append(trace)
            return trace
        finally:
            self._spent_s += self.now_s() - start_s
            self.num_traced += 1

    def _try(self, call: Callable[[], object]) -> KernelTrace:
        if self.num_failed >= _FAILURES_MAX:
            return NOT_TRACED
        try:
            return trace_kernels(call, self.device, self.now_s)
        except Exception as err:  # noqa: BLE001
            # A profiler that a driver or a container forbids raises whatever it likes. The call
            # itself has been timed already; a device that is gone will say so at the next one.
            self.num_failed += 1
            _log.warning("a kernel's name cannot be looked up: %s: %s", type(err).__name__, err)
            return NOT_TRACED


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what C++ code prints to stderr: a first start in another thread than the import's does.

    Nothing is wrong then: only profiling on request from outside needs that thread.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _without_parameters(name: str) -> str:
    """Cut the last pair of brackets, where it is the list of parameters: right after a name."""
    if not name.endswith(")"):
        return name
    depth = 0
    for position in range(len(name) - 1, 0, -1):
        depth += {")": 1, "(": -1}.get(name[position], 0)
        if depth == 0:
            return name if name[position - 1] == " " else name[:position]
    return name
