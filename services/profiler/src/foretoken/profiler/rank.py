"""One rank of a group that times collectives: a program that `collectives` starts."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import distributed

from foretoken.domain.errors import ForetokenError
from foretoken.domain.estimate import OperatorCall
from foretoken.domain.units import US_PER_S
from foretoken.profiler.collectives import (
    CollectiveTimingError,
    GroupLostError,
    GroupSpec,
    RankOrder,
)
from foretoken.profiler.kernel import TORCH_DTYPES, TensorFactory
from foretoken.profiler.timer import (
    CpuStopwatch,
    CudaStopwatch,
    IndexedCall,
    Stopwatch,
    TimingSummary,
    time_case,
)

_CUDA_FLUSH_BYTES = 2**28


class GroupStopwatch:
    """Starts calls on all ranks together; the slowest rank's time counts on each.

    Its clock is the time so agreed, so that all ranks decide alike when to stop.
    """

    def __init__(self, local: Stopwatch, device: torch.device) -> None:
        """Take this rank's own time with `local`."""
        self._local = local
        self._device = device
        self._agreed_us = 0.0

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs of the slowest rank."""
        distributed.barrier()
        elapsed_us = self._local.time_calls_us(call, first, num_calls)
        slowest = torch.tensor([elapsed_us], dtype=torch.float64, device=self._device)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        self._agreed_us += float(slowest)
        return float(slowest)

    def now_s(self) -> float:
        """Return the sum of agreed times."""
        return self._agreed_us / US_PER_S


def prepare_collective(call: OperatorCall, tensors: TensorFactory) -> Callable[[], object]:
    """Return what this rank runs; `message_bytes` means what the operator's file says."""
    num_ranks = distributed.get_world_size()
    size = max(int(call.dims["message_bytes"] / call.dtype.num_bytes), num_ranks)
    size -= size % num_ranks
    whole, shard = tensors.random(size), tensors.random(size // num_ranks)
    match call.operator:
        case "all_reduce":
            return lambda: distributed.all_reduce(whole)
        case "all_gather":
            all_gather = _find("all_gather_single", "all_gather_into_tensor")
            return lambda: all_gather(whole, shard)
        case "reduce_scatter":
            reduce_scatter = _find("reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: reduce_scatter(shard, whole)
        case "all_to_all":
            received = torch.empty_like(whole)
            return lambda: distributed.all_to_all_single(received, whole)
        case "send_recv":
            return lambda: _send_there_and_back(whole)
        case _:
            raise CollectiveTimingError(f"no code runs {call.operator}")


def _find(name: str, former_name: str) -> Callable[..., object]:
    """Return torch's function; newer versions warn about the former name."""
    found: Callable[..., object] = getattr(distributed, name, None) or getattr(
        distributed, former_name
    )
    return found


def _send_there_and_back(tensor: torch.Tensor) -> None:
    rank = distributed.get_rank()
    if rank == 0:
        distributed.send(tensor, 1)
        distributed.recv(tensor, 1)
    elif rank == 1:
        distributed.recv(tensor, 0)
        distributed.send(tensor, 0)


def serve_rank(connection: Connection) -> None:
    """Join the group that the first message describes, then time calls until the pipe closes."""
    order: RankOrder = connection.recv()
    device = torch.device("cuda", order.rank) if order.group.is_cuda else torch.device("cpu")
    try:
        distributed.init_process_group(
            order.group.backend,
            init_method=f"file://{order.meeting_file}",
            rank=order.rank,
            world_size=order.group.num_ranks,
            timeout=timedelta(seconds=order.timeout_s),
        )
        stopwatch = GroupStopwatch(_local_stopwatch(device), device)
    except RuntimeError as err:
        connection.send(GroupLostError(f"the ranks did not meet: {err}"))
        return
    connection.send(None)
    try:
        while True:
            connection.send(_answer(connection.recv(), stopwatch, device, order.group))
    except (EOFError, OSError):
        return
    finally:
        distributed.destroy_process_group()


def _local_stopwatch(device: torch.device) -> Stopwatch:
    if device.type == "cpu":
        return CpuStopwatch()
    torch.cuda.set_device(device)
    stopwatch = CudaStopwatch(device, _CUDA_FLUSH_BYTES)
    stopwatch.open()
    return stopwatch


def _answer(
    call: OperatorCall, stopwatch: GroupStopwatch, device: torch.device, spec: GroupSpec
) -> TimingSummary | CollectiveTimingError:
    tensors = TensorFactory(device, TORCH_DTYPES[call.dtype], spec.seed)
    try:
        run = prepare_collective(call, tensors)
        # There and back are two transfers.
        num_transfers = 2 if call.operator == "send_recv" else 1
        return time_case(lambda _: run(), stopwatch, spec.timer).divided_by(num_transfers)
    except (RuntimeError, ForetokenError, CollectiveTimingError) as err:
        return CollectiveTimingError(f"{type(err).__name__}: {err}")


def main(file_descriptor: int) -> None:
    """Serve the pipe end inherited under that number."""
    # Ctrl-C reaches the whole process group; this process ends when its pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # Host names of pods and laptops do not always resolve; loopback always does.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with Connection(file_descriptor) as connection:
        serve_rank(connection)


if __name__ == "__main__":
    main(int(sys.argv[1]))
