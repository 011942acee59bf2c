"""A thing of the host that is timed: how it is sampled, and launches of tiny kernels."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from foretoken.domain.units import NS_PER_US, US_PER_MS
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


_COUNTS = (1, 4, 16, 64, 256, 1024)
_QUICK_COUNTS = (1, 16, 256)


def launch_probes(device: LocalDevice, *, quick: bool) -> Iterator[HostProbe]:
    """Yield the launches of increasing numbers of kernels."""
    for count in _QUICK_COUNTS if quick else _COUNTS:
        run = _make_run(device, count)
        yield HostProbe(
            operator="launch_gap",
            dims={"num_kernels": count},
            kernel="torch.Tensor.add_",
            sample=lambda run=run: {"launch_eager": time_on_host(run, device)},  # type: ignore[misc]
        )
        if device.is_cuda:
            yield HostProbe(
                operator="launch_gap",
                dims={"num_kernels": count},
                kernel="torch.cuda.CUDAGraph",
                sample=_replay(run, device),
            )


def _make_run(device: LocalDevice, count: int) -> Callable[[], None]:
    tensor = torch.ones(1, device=device.torch_device)

    def run() -> None:
        for _ in range(count):
            tensor.add_(1.0)

    return run


def _replay(run: Callable[[], None], device: LocalDevice) -> Callable[[], Mapping[str, float]]:
    """Return what times a graph: the call on the host, and its kernels on the device."""
    side = torch.cuda.Stream(device.torch_device)
    with torch.cuda.stream(side):
        run()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def sample() -> Mapping[str, float]:
        launch_us = time_on_host(graph.replay, device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(device.torch_device))
        graph.replay()
        end.record(torch.cuda.current_stream(device.torch_device))
        end.synchronize()
        replay_us = float(start.elapsed_time(end)) * US_PER_MS
        return {"launch_graph": launch_us, "replay": replay_us}

    return sample
