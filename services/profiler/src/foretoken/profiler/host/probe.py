"""A thing of the host that is timed, and how it is sampled."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from foretoken.domain.units import NS_PER_US
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.timer import TimingSummary, median_interval_ratio, summarize

# Samples that say enough, and seconds after which there must be enough of them.
_FEWEST_SAMPLES, _MOST_SAMPLES = 5, 400
_INTERVAL_RATIO = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProbe:
    """Times that are taken together, so that what disturbs one disturbs all.

    `sample()` returns µs by part: rows of `operator`, variant `part=...`, at `dims`. `kernel` names
    the code that is timed.
    """

    operator: str
    dims: Mapping[str, int]
    kernel: str
    sample: Callable[[], Mapping[str, float]]


def sample_probe(probe: HostProbe, longest_s: float) -> Mapping[str, TimingSummary]:
    """Return the statistics of each part, once the medians are known well or time is up."""
    probe.sample()
    probe.sample()
    found: dict[str, list[float]] = {}
    begin_s, count = time.monotonic(), 0
    while count < _FEWEST_SAMPLES or not _is_enough(found, time.monotonic() - begin_s, longest_s):
        for part, taken_us in probe.sample().items():
            found.setdefault(part, []).append(taken_us)
        count += 1
    return {part: summarize(samples_us) for part, samples_us in found.items()}


def host_clock(device: LocalDevice) -> Callable[[], int]:
    """Return the clock in ns that the work of the host is timed by, as operators are.

    On a CPU whose work one thread does all, it stands still while that thread has no core.
    """
    is_one_thread = not device.is_cuda and torch.get_num_threads() == 1
    return time.thread_time_ns if is_one_thread else time.perf_counter_ns


def time_on_host(run: Callable[[], object], device: LocalDevice) -> float:
    """Return the µs that a call takes on the host; what it queues on a GPU is waited for after."""
    clock_ns = host_clock(device)
    start_ns = clock_ns()
    run()
    taken_us = (clock_ns() - start_ns) / NS_PER_US
    synchronize(device)
    return taken_us


def synchronize(device: LocalDevice) -> None:
    """Wait until the device has nothing left to do."""
    if device.is_cuda:
        torch.cuda.synchronize(device.torch_device)


def _is_enough(found: Mapping[str, Sequence[float]], elapsed_s: float, longest_s: float) -> bool:
    if elapsed_s >= longest_s:
        return True
    counts = [len(samples) for samples in found.values()]
    if min(counts) >= _MOST_SAMPLES:
        return True
    return all(median_interval_ratio(samples) <= _INTERVAL_RATIO for samples in found.values())
