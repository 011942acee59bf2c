"""Launches of one tiny kernel after the other: eager, and as a CUDA graph."""

from collections.abc import Callable, Iterator, Mapping

import torch

from foretoken.domain.units import US_PER_MS
from foretoken.profiler.host.probe import HostProbe, synchronize, time_on_host
from foretoken.profiler.local_device import LocalDevice

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
