"""Turn the order of every rank into what it does step by step, transfers included.

The output of a pass goes to the rank that runs the next one for the same micro batch: the chunk
after for activations, the chunk before for gradients. Between chunks on one rank nothing is sent.

Where both ends take part in a transfer, a rank with one chunk and whole backward passes sends and
receives in the order of its passes, one neighbour after the other, as the 1F1B of Megatron-LM and
DeepSpeed do; what it exchanges with the same neighbour between two passes goes together. In all
other schedules inputs do not arrive in the order of use. There a rank announces a receive when the
input would be made if all took the same time, and waits for it where it is used; that is what
Megatron-LM's interleaved schedule and zero-bubble's write out by hand, and it cannot deadlock.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.steps.pipelines.schedule import RankOrder

WAITS_FOR_EVER = "its ranks wait for each other for ever"


class Transfer(NamedTuple):
    """The output of one pass on its way; `chunk` is the one that made it."""

    source: int
    target: int
    is_forward: bool
    chunk: int
    micro_batch: int


class Gate(NamedTuple):
    """What a rank does at one point: announce transfers, wait for some, then run a slot.

    Transfers are numbers in the list of all; gradients come before activations. `slot` -1 is none.
    """

    announced: tuple[int, ...]
    awaited: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class PipelineProgram:
    """All transfers of a step, and what every rank does, in order."""

    transfers: Sequence[Transfer]
    gates: Sequence[Sequence[Gate]]


def build_program(orders: Sequence[RankOrder], *, holds_sender: bool) -> PipelineProgram:
    """Return the program of a schedule; with `holds_sender` both ends take part in a transfer.

    Raises:
        InvalidRequestError: ranks wait for each other for ever, whatever the times.

    """
    traffic = _list_traffic(orders)
    if not holds_sender:
        gates = [_buffered_gates(traffic, rank) for rank in range(len(orders))]
    elif all(map(_is_plain, orders)):
        gates = [_SequentialGates(traffic, rank).build() for rank in range(len(orders))]
    else:
        gates = _batched_gates(traffic)
    return PipelineProgram(traffic.transfers, gates)


def _is_plain(order: RankOrder) -> bool:
    """Whether a rank holds one chunk, and runs its backward passes as a whole."""
    passes = [item for slot in order for item in slot]
    is_whole = all(item.kind in {"forward", "backward"} for item in passes)
    return is_whole and len({item.chunk for item in passes}) <= 1


@dataclass(frozen=True, slots=True)
class _Traffic:
    """All transfers, and their numbers by rank and slot that makes and that needs them.

    `makers` are the slots that make the transfers, by number.
    """

    orders: Sequence[RankOrder]
    transfers: list[Transfer]
    makers: list[int]
    sent: list[list[list[int]]]
    received: list[list[list[int]]]

    def num_slots(self, rank: int) -> int:
        return len(self.orders[rank])

    def is_forward(self, index: int) -> bool:
        return self.transfers[index].is_forward


def _list_traffic(orders: Sequence[RankOrder]) -> _Traffic:
    places = _place_passes(orders)
    sent: list[list[list[int]]] = [[[] for _ in order] for order in orders]
    received: list[list[list[int]]] = [[[] for _ in order] for order in orders]
    found = _Traffic(orders, [], [], sent, received)
    for (is_forward, micro_batch, chunk), (rank, slot) in places.items():
        before = chunk - 1 if is_forward else chunk + 1
        made = places.get((is_forward, micro_batch, before))
        if made is None:
            continue
        source, maker = made
        if source != rank:
            sent[source][maker].append(len(found.transfers))
            received[rank][slot].append(len(found.transfers))
            found.transfers.append(Transfer(source, rank, is_forward, before, micro_batch))
            found.makers.append(maker)
        elif maker >= slot:
            message = f"rank {rank} runs chunk {chunk} before what it needs is there"
            raise InvalidRequestError.of_field("pipeline_schedule", message)
    return found


# (whether forward, micro batch, chunk) -> (rank, slot)
_Places = dict[tuple[bool, int, int], tuple[int, int]]


def _place_passes(orders: Sequence[RankOrder]) -> _Places:
    """Return where every pass is that others wait for."""
    return {
        (item.kind == "forward", item.micro_batch, item.chunk): (rank, index)
        for rank, order in enumerate(orders)
        for index, slot in enumerate(order)
        for item in slot
        if item.kind != "backward_weight"
    }


def _buffered_gates(traffic: _Traffic, rank: int) -> list[Gate]:
    """Return the gates of a rank that leaves its sends to the link."""
    sent = [[], *traffic.sent[rank]]
    received = traffic.received[rank]
    gates = [Gate(tuple(sent[i]), tuple(received[i]), i) for i in range(traffic.num_slots(rank))]
    return [*gates, Gate(tuple(sent[-1]), (), -1)]


def _batched_gates(traffic: _Traffic) -> list[list[Gate]]:
    """Return the gates of ranks that announce receives ahead of their use."""
    ends = _run_in_step(traffic)
    announced = [[[], *map(list, sent)] for sent in traffic.sent]
    for index, transfer in enumerate(traffic.transfers):
        made_at = ends[transfer.source][traffic.makers[index]]
        announced[transfer.target][bisect_right(ends[transfer.target], made_at)].append(index)
    return [
        [
            Gate(
                tuple(sorted(announced[rank][place], key=traffic.is_forward)),
                (*sends, *inputs),
                slot,
            )
            for place, (sends, inputs, slot) in enumerate(
                zip(
                    [[], *traffic.sent[rank]],
                    [*traffic.received[rank], []],
                    [*range(traffic.num_slots(rank)), -1],
                    strict=True,
                )
            )
        ]
        for rank in range(len(traffic.orders))
    ]


def _run_in_step(traffic: _Traffic) -> list[list[int]]:
    """Return when every slot ends if each half of a pass takes one tick and transfers none."""
    ends: list[list[int]] = [[] for _ in traffic.orders]
    clocks = [0] * len(traffic.orders)
    sleepers: dict[tuple[int, int], int] = {}
    queue = deque(range(len(traffic.orders)))
    while queue:
        rank = queue.popleft()
        for place in range(len(ends[rank]), len(traffic.orders[rank])):
            slot = traffic.orders[rank][place]
            inputs = traffic.received[rank][place]
            needed = [(traffic.transfers[i].source, traffic.makers[i]) for i in inputs]
            unmade = [at for at in needed if len(ends[at[0]]) <= at[1]]
            if unmade:
                sleepers[unmade[0]] = rank
                break
            start = max([clocks[rank], *(ends[source][maker] for source, maker in needed)])
            clocks[rank] = start + sum(2 if item.kind == "backward" else 1 for item in slot)
            ends[rank].append(clocks[rank])
            if (rank, place) in sleepers:
                queue.append(sleepers.pop((rank, place)))
    if any(len(done) < len(order) for done, order in zip(ends, traffic.orders, strict=True)):
        raise InvalidRequestError.of_field("pipeline_schedule", WAITS_FOR_EVER)
    return ends


class _SequentialGates:
    """The gates of a rank that takes part in its sends, one neighbour after the other."""

    def __init__(self, traffic: _Traffic, rank: int) -> None:
        self._traffic = traffic
        self._rank = rank

    def build(self) -> list[Gate]:
        """Return the gates of all slots."""
        gates: list[Gate] = []
        sent, received = self._traffic.sent[self._rank], self._traffic.received[self._rank]
        slots = [*range(self._traffic.num_slots(self._rank)), -1]
        for sends, inputs, slot in zip([[], *sent], [*received, []], slots, strict=True):
            together = [*sends, *inputs]
            if {*map(self._peer, sends)} - {*map(self._peer, inputs)}:
                gates.append(Gate(tuple(sends), tuple(sends), -1))
                together = inputs
            together = sorted(together, key=self._traffic.is_forward)
            gates.append(Gate(tuple(together), tuple(together), slot))
        return gates

    def _peer(self, index: int) -> int:
        transfer = self._traffic.transfers[index]
        return transfer.target if transfer.source == self._rank else transfer.source
