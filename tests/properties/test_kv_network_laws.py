"""What holds for transfers between ports, however many there are and whoever gives up."""

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from foretoken.simulator.cluster.event_queue import EventKind, EventQueue
from foretoken.simulator.cluster.handover import KvNetwork, Transfer
from foretoken.simulator.engine.layout import NEVER_NS

_LATENCY_NS = 5
# When asked for, sender, receiver, how long on the one and the other port, given up so much later
# (0: not)
_asked = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 2),
        st.integers(10, 12),
        st.integers(1, 20),
        st.integers(1, 20),
        st.sampled_from((0, 0, 0, 7, 30)),
    ),
    max_size=15,
)
Asked = tuple[int, int, int, int, int, int]
Landed = dict[Transfer, int]


def _run(asked: list[Asked]) -> tuple[list[Transfer], Landed, KvNetwork]:
    """Return the transfers in the order asked for, when those landed that did, and the network."""
    events = EventQueue()
    landed: Landed = {}
    network = KvNetwork(events, _LATENCY_NS, landed.__setitem__)
    transfers = []
    for request, (time_ns, sender, receiver, *busy_ns, given_up_ns) in enumerate(sorted(asked)):
        transfer = Transfer(request, sender, receiver, *busy_ns)
        transfers.append(transfer)

        def ask(_: int, now_ns: int, transfer: Transfer = transfer) -> None:
            network.ask(transfer, now_ns)

        def give_up(_: int, now_ns: int, transfer: Transfer = transfer) -> None:
            if transfer not in landed:
                network.give_up(transfer, now_ns)
                landed[transfer] = -1

        events.push(time_ns, EventKind.START, ask)
        if given_up_ns:
            events.push(time_ns + given_up_ns, EventKind.ARRIVAL, give_up)
    while (now_ns := events.next_ns) < NEVER_NS:
        events.pop(now_ns)
    return transfers, landed, network


@given(asked=_asked)
def test_every_transfer_lands_once_or_was_given_up(asked: list[Asked]) -> None:
    transfers, landed, _ = _run(asked)
    assert set(transfers) == set(landed)


@given(asked=_asked)
def test_transfers_on_a_port_never_overlap_nor_overtake(asked: list[Asked]) -> None:
    """Each has its ports for as long as it takes, after it was asked for, in that order."""
    transfers, landed, network = _run(asked)
    by_port = defaultdict(list)
    for transfer, (asked_ns, *_) in zip(transfers, sorted(asked), strict=True):
        if landed[transfer] < 0:
            continue
        slower_ns = max(transfer.sender_ns, transfer.receiver_ns)
        start_ns = landed[transfer] - _LATENCY_NS - slower_ns
        assert start_ns >= asked_ns
        for port, busy_ns in transfer.ports:
            by_port[port].append((start_ns, start_ns + busy_ns))
    for port, times in by_port.items():
        assert all(before[1] <= after[0] for before, after in pairwise(times))
        assert network.busy_ns[port] >= sum(end - start for start, end in times)


@given(asked=_asked)
def test_one_port_at_a_time_is_a_queue(asked: list[Asked]) -> None:
    """With one receiver and nobody who gives up, each starts when the one before has ended."""
    one = [(time_ns, sender, 10, busy_ns, busy_ns, 0) for time_ns, sender, _, busy_ns, *_ in asked]
    transfers, landed, _ = _run(one)
    free_ns = 0
    for transfer, (asked_ns, *_) in zip(transfers, sorted(one), strict=True):
        free_ns = max(free_ns, asked_ns) + transfer.receiver_ns
        assert landed[transfer] == free_ns + _LATENCY_NS
