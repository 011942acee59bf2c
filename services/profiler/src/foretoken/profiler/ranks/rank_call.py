"""What one rank runs of a call: its part of a collective, or a computation of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import distributed

from foretoken.domain.errors import DeviceMemoryError
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.profiler.environment import free_memory_bytes
from foretoken.profiler.kernel import TensorFactory, kernel_of_call
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.ranks.group_spec import CollectiveTimingError
from foretoken.profiler.ranks.rendezvous_store import RankGroup

# Calls in one CUDA graph.
_GRAPH_CALLS = 10
# A message, what is received or the values to begin anew with, and a library's own buffers.
_MESSAGE_COPIES = 3
# Ranks of a CPU share its memory, and others need some, too.
_MEMORY_RATIO_MAX = 0.5
_PAIR = 2
# What a collective's variant may ask for here; `beside` is another's business.
_FACTS = ("beside", "beside_dims", "graph", "pattern")

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCall:
    """`run` makes `num_calls` calls at once; `refresh` restores what they have overwritten."""

    run: Run
    refresh: Run
    num_calls: int = 1


def prepare_rank_call(call: OperatorCall, tensors: TensorFactory, peers: RankGroup) -> RankCall:
    """Return what this rank runs of a call.

    Raises:
        CollectiveTimingError: no code here runs it.
        DeviceMemoryError: it does not fit.
        InvalidRequestError: no kernel runs the computation.

    """
    if not find_operator(call.operator).is_collective:
        return _prepare_computation(call, tensors)
    facts = parse_variant(call.variant)
    unknown = [name for name in facts if name not in _FACTS]
    if unknown:
        raise CollectiveTimingError(f"no code runs {call.operator} with {', '.join(unknown)}")
    _check_memory(call, tensors.device, peers)
    prepared = _prepare_collective(call, tensors, peers, facts)
    return _capture(prepared, tensors.device) if facts.get("graph") == "true" else prepared


def _prepare_computation(call: OperatorCall, tensors: TensorFactory) -> RankCall:
    kernel = kernel_of_call(call, tensors.device)
    inputs = kernel.make_inputs(call.dims, tensors)
    forward = kernel.bind(call.dims)

    def run() -> object:
        with torch.no_grad():
            return forward(*inputs)

    return RankCall(run=run, refresh=_nothing)


def _check_memory(call: OperatorCall, device: torch.device, peers: RankGroup) -> None:
    needed = float(_MESSAGE_COPIES * call.dims["message_bytes"])
    local = LocalDevice(name=device.type, torch_name=str(device))
    if not local.is_cuda:
        needed *= call.dims["devices_per_node"]
    # The least of all: ranks of a CPU make theirs while others ask.
    [most_taken] = peers.agree(-free_memory_bytes(local))
    allowed = -most_taken * _MEMORY_RATIO_MAX
    if needed > allowed:
        raise DeviceMemoryError(f"needs about {needed:.3g} bytes, {allowed:.3g} may be used")


def _prepare_collective(
    call: OperatorCall, tensors: TensorFactory, peers: RankGroup, facts: Mapping[str, str]
) -> RankCall:
    num_ranks, group = len(peers.ranks), peers.group
    size = max(int(call.dims["message_bytes"] / call.dtype.num_bytes), num_ranks)
    size -= size % num_ranks
    whole, shard = tensors.random(size), tensors.random(size // num_ranks)
    match call.operator:
        case "all_reduce":
            # Sums of sums grow without bound, so each sample begins with the first values.
            values = whole.clone()
            return RankCall(
                run=lambda: distributed.all_reduce(whole, group=group),
                refresh=lambda: whole.copy_(values),
            )
        case "all_gather":
            all_gather = _find("all_gather_single", "all_gather_into_tensor")
            return _plain(lambda: all_gather(whole, shard, group=group))
        case "reduce_scatter":
            reduce_scatter = _find("reduce_scatter_single", "reduce_scatter_tensor")
            return _plain(lambda: reduce_scatter(shard, whole, group=group))
        case "all_to_all":
            received = torch.empty_like(whole)
            return _plain(lambda: distributed.all_to_all_single(received, whole, group=group))
        case "broadcast":
            return _plain(lambda: distributed.broadcast(whole, src=peers.ranks[0], group=group))
        case "send_recv":
            return _prepare_transfer(whole, peers, is_ring=facts.get("pattern") == "ring")
        case _:
            raise CollectiveTimingError(f"no code runs {call.operator}")


def _prepare_transfer(tensor: torch.Tensor, peers: RankGroup, *, is_ring: bool) -> RankCall:
    if is_ring:
        return _plain(_ring_exchange(tensor, peers))
    if len(peers.ranks) != _PAIR:
        raise CollectiveTimingError("send_recv joins a pair; more ranks are pattern=ring")
    # There and back are two transfers.
    return RankCall(run=_round_trip(tensor, peers), refresh=_nothing, num_calls=2)


def _plain(run: Run) -> RankCall:
    return RankCall(run=run, refresh=_nothing)


def _nothing() -> None:
    """Nothing was overwritten."""


def _find(name: str, former_name: str) -> Callable[..., object]:
    """Return torch's function; newer versions warn about the former name."""
    found: Callable[..., object] = getattr(distributed, name, None) or getattr(
        distributed, former_name
    )
    return found


def _round_trip(tensor: torch.Tensor, peers: RankGroup) -> Run:
    other, group = peers.next_rank, peers.group

    def run() -> None:
        if peers.place == 0:
            distributed.send(tensor, other, group=group)
            distributed.recv(tensor, other, group=group)
        else:
            distributed.recv(tensor, other, group=group)
            distributed.send(tensor, other, group=group)

    return run


def _ring_exchange(sent: torch.Tensor, peers: RankGroup) -> Run:
    """Send to the next rank and receive from the one before, at the same time."""
    received, group = torch.empty_like(sent), peers.group

    def run() -> None:
        exchange = [
            distributed.P2POp(distributed.isend, sent, peers.next_rank, group),
            distributed.P2POp(distributed.irecv, received, peers.previous_rank, group),
        ]
        for work in distributed.batch_isend_irecv(exchange):
            work.wait()

    return run


def _capture(prepared: RankCall, device: torch.device) -> RankCall:
    """Return the calls as a CUDA graph of several."""
    if device.type != "cuda":
        raise CollectiveTimingError("graph=true needs a CUDA device")
    # The communicator must be there before capture.
    prepared.run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile, which other modes forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_GRAPH_CALLS):
            prepared.run()
    return RankCall(
        run=graph.replay,
        refresh=prepared.refresh,
        num_calls=_GRAPH_CALLS * prepared.num_calls,
    )
