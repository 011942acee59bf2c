"""One rank of a group that times collectives: a program that `local_ranks` starts."""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import distributed

from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.operators.spec.overlap import (
    find_companion,
    group_of_call,
    is_timed_during,
    plain_call,
)
from foretoken.profiler.kernel import TORCH_DTYPES, TensorFactory
from foretoken.profiler.ranks.group_spec import (
    CollectiveTimingError,
    GroupLostError,
    OtherRankError,
    RankOrder,
)
from foretoken.profiler.ranks.local_ranks import Answer
from foretoken.profiler.ranks.rank_call import RankCall, prepare_rank_call
from foretoken.profiler.ranks.rendezvous import RendezvousSpec
from foretoken.profiler.ranks.rendezvous_store import RankGroup, RankGroups, connect_store
from foretoken.profiler.ranks.stopwatch import (
    CudaOverlapStopwatch,
    GroupStopwatch,
    OverlapStopwatch,
    choose_stopwatch,
)
from foretoken.profiler.timing.timer import TimingSummary, time_case

# Long enough that starting the concurrent calls does not enter.
_OVERLAP_SAMPLE_US_MIN = 5_000.0
# Enough to know about how many calls of each take as long.
_PAIRING_CASE_S_MAX = 0.1
_WATCH_S = 1.0
# Causes of a failure before any rank waits for another.
_PREPARATION_ERRORS = (RuntimeError, ForetokenError, CollectiveTimingError, ValueError, TypeError)


class Rank:
    """Times this rank's part of calls in the groups of ranks they name."""

    def __init__(self, order: RankOrder, device: torch.device) -> None:
        """Be the rank of that order on that device."""
        self._spec = order.group
        self._device = device
        self._groups = RankGroups(order=order, device=device)
        # Factories draw their values once.
        self._tensors: dict[DType, TensorFactory] = {}

    def answer(self, call: OperatorCall) -> Answer:
        """Return the time of a call, why there is none, or None where this rank has no part."""
        try:
            peers = self._groups.join(*group_of_call(call))
            return self._time(call, peers) if peers is not None else None
        except CollectiveTimingError as err:
            return err
        except ForetokenError as err:
            return CollectiveTimingError(f"{type(err).__name__}: {err}")
        except RuntimeError as err:
            # In the middle of things: who knows what the other ranks wait for.
            return GroupLostError(_reason_of(err))
        finally:
            if self._device.type == "cuda":
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()

    def _time(self, call: OperatorCall, peers: RankGroup) -> TimingSummary:
        prepared = self._prepare(plain_call(call) if is_timed_during(call) else call, peers)
        companion = find_companion(call)
        if companion is None:
            return self._time_prepared(prepared, peers)
        return self._time_during(prepared, self._prepare(companion, peers), peers)

    def _time_prepared(self, prepared: RankCall, peers: RankGroup) -> TimingSummary:
        aligning = torch.ones(1, device=self._device)
        local = choose_stopwatch(
            self._device, lambda: distributed.all_reduce(aligning, group=peers.group)
        )
        stopwatch = GroupStopwatch(local, peers, prepared.refresh)
        summary = time_case(lambda _: prepared.run(), stopwatch, self._spec.timer)
        return summary.divided_by(prepared.num_calls)

    def _time_briefly_us(self, prepared: RankCall, peers: RankGroup) -> float:
        timer = self._spec.timer
        brief = dataclasses.replace(timer, case_s_max=min(timer.case_s_max, _PAIRING_CASE_S_MAX))
        local = choose_stopwatch(self._device, _nothing)
        stopwatch = GroupStopwatch(local, peers, prepared.refresh)
        return time_case(lambda _: prepared.run(), stopwatch, brief).latency_us_median

    def _time_during(self, prepared: RankCall, other: RankCall, peers: RankGroup) -> TimingSummary:
        pair_us = [self._time_briefly_us(one, peers) for one in (prepared, other)]
        pair_ratio = pair_us[0] / pair_us[1]
        overlapping = (
            CudaOverlapStopwatch(other.run, pair_ratio, peers.agree, self._device)
            if self._device.type == "cuda"
            else OverlapStopwatch(other.run, pair_ratio, peers.agree)
        )

        def refresh() -> None:
            prepared.refresh()
            other.refresh()

        stopwatch = GroupStopwatch(overlapping, peers, refresh)
        timer = self._spec.timer
        sample_us = max(timer.sample_us_min, _OVERLAP_SAMPLE_US_MIN)
        timer = dataclasses.replace(timer, sample_us_min=sample_us)
        summary = time_case(lambda _: prepared.run(), stopwatch, timer)
        return summary.divided_by(prepared.num_calls)

    def _prepare(self, call: OperatorCall, peers: RankGroup) -> RankCall:
        """Return what to run, after all ranks have run it once.

        Raises:
            CollectiveTimingError: this rank or another one cannot.

        """
        reason = ""
        prepared = None
        try:
            prepared = prepare_rank_call(call, self._tensors_of(call.dtype), peers)
            prepared.run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except _PREPARATION_ERRORS as err:
            reason = str(err) if isinstance(err, CollectiveTimingError) else _reason_of(err)
        [has_failed] = peers.agree(1.0 if reason else 0.0)
        if reason or prepared is None:
            raise CollectiveTimingError(reason)
        if has_failed:
            raise OtherRankError("another rank could not do its part")
        return prepared

    def _tensors_of(self, dtype: DType) -> TensorFactory:
        if dtype not in self._tensors:
            if dtype not in TORCH_DTYPES:
                raise CollectiveTimingError(f"torch has no {dtype.name.lower()}")
            seed = self._spec.seed
            self._tensors[dtype] = TensorFactory(self._device, TORCH_DTYPES[dtype], seed)
        return self._tensors[dtype]


def serve_rank(connection: Connection) -> None:
    """Join the group that the first message describes, then time calls until the pipe closes."""
    order: RankOrder = connection.recv()
    _choose_interface(order)
    try:
        device = _open_device(order)
        _meet(order)
        connection.send(None)
    except (RuntimeError, OSError) as err:
        connection.send(GroupLostError(f"the ranks did not meet: {_reason_of(err)}"))
        return
    rank = Rank(order, device)
    try:
        while True:
            connection.send(rank.answer(connection.recv()))
    except (EOFError, OSError):
        return


def _choose_interface(order: RankOrder) -> None:
    if not order.interface:
        return
    is_asked_for = bool(order.group.rendezvous.interface)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL finds the way between nodes itself, which may be InfiniBand.
        if name.startswith("NCCL") and not is_asked_for:
            continue
        if is_asked_for:
            os.environ[name] = order.interface
        else:
            os.environ.setdefault(name, order.interface)


def _open_device(order: RankOrder) -> torch.device:
    if not order.group.is_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", order.local_rank)
    torch.cuda.set_device(device)
    return device


def _meet(order: RankOrder) -> None:
    timeout = timedelta(seconds=order.timeout_s)
    world_size, rank = order.group.world_size, order.rank
    if order.group.rendezvous.num_nodes == 1:
        store: distributed.Store = distributed.FileStore(order.place, world_size)
    else:
        host, port = RendezvousSpec(endpoint=order.place).address
        served = connect_store(host, port, is_serving=False, wait_s=order.timeout_s)
        store = distributed.PrefixStore(order.prefix, served)
    distributed.init_process_group(
        order.group.backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def _nothing() -> None:
    """Wait for nobody."""


def _reason_of(err: Exception) -> str:
    lines = str(err).strip().splitlines() or [""]
    return f"{type(err).__name__}: {lines[0]}"


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: one that waits for others reads no pipe."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


def main(file_descriptor: int, parent: int) -> None:
    """Serve the pipe end inherited under that number, from the process of that id."""
    # Ctrl-C reaches the whole process group; this process ends when its pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    with Connection(file_descriptor) as connection:
        serve_rank(connection)
    # The groups are not taken down: that waits for ranks which may be gone.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
