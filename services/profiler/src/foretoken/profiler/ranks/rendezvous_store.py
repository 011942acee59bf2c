"""What nodes of a group tell each other through the key-value store of node 0."""

import enum
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore

from foretoken.domain import schema
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.profiler.ranks.group_spec import (
    CollectiveTimingError,
    GroupLostError,
    GroupSpec,
    OtherRankError,
    RankOrder,
    ranks_of_group,
)
from foretoken.profiler.ranks.local_ranks import Answer
from foretoken.profiler.ranks.rendezvous import RendezvousSpec
from foretoken.profiler.timing.timer import TimingSummary

_log = logging.getLogger(__name__)

# Called while waiting, and asked whether to go on: it may raise.
Notify = Callable[[str], None]

_CONNECT_S = 5.0
_RETRY_S = 1.0
_BEAT_S = 1.0
_POLL_S = 0.05
# Waiting is reported so often.
_NOTIFY_S = 2.0
# Longest wait for a single answer of the store itself.
_STORE_S = 60.0


_ERRORS = {
    error.__name__: error for error in (CollectiveTimingError, GroupLostError, OtherRankError)
}


class OrderKind(enum.Enum):
    """What node 0 requests: start ranks anew, time a call, or leave."""

    OPEN = enum.auto()
    TIME = enum.auto()
    CLOSE = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOrder:
    """What node 0 tells all others."""

    kind: OrderKind
    generation: int = 0
    group: GroupSpec | None = None
    call: OperatorCall | None = None


def greeting_key(node: int) -> str:
    """Return the key under which a node says what it has."""
    return f"greeting/{node}"


def order_key(number: int) -> str:
    """Return the key of node 0's orders, which are numbered from 1."""
    return f"order/{number}"


def answer_key(number: int, node: int) -> str:
    """Return the key of a node's answer to an order."""
    return f"answer/{number}/{node}"


def answer_to_content(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain data."""
    if isinstance(answer, CollectiveTimingError):
        return {"error": type(answer).__name__, "message": str(answer)}
    return {"summary": schema.encode(answer)} if answer is not None else {}


def answer_from_content(content: Mapping[str, Any]) -> Answer:
    """Return the answer that plain data are."""
    if "error" in content:
        return _ERRORS[content["error"]](content["message"])
    if "summary" in content:
        return schema.decode(TimingSummary, content["summary"], "answer")
    return None


def connect_store(host: str, port: int, *, is_serving: bool, wait_s: float) -> Store:
    """Return a connection to the store at an endpoint, served by this process or another one.

    Raises:
        RuntimeError: there is none, or the port is taken.

    """
    store = TCPStore(
        host,
        port,
        is_master=is_serving,
        timeout=timedelta(seconds=wait_s),
        wait_for_workers=False,
    )
    store.set_timeout(timedelta(seconds=_STORE_S))
    return store


class Rendezvous:
    """One node's place in a rendezvous: says and hears messages, and notices who is gone."""

    def __init__(self, spec: RendezvousSpec) -> None:
        """Describe where to meet; `open` goes there."""
        self._spec = spec
        self._store: Store | None = None
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None
        # Node -> its latest beat, and when it came.
        self._beats: dict[int, tuple[int, float]] = {}

    def __enter__(self) -> Self:
        """Use as a context manager to close it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def open(self, notify: Notify = _log.info) -> None:
        """Serve the store on node 0; on others connect to it as soon as it is there.

        Raises:
            GroupLostError: the port is taken, or node 0 did not come in time.

        """
        host, port = self._spec.address
        is_serving = self._spec.is_leader and not self._spec.is_served
        deadline_s = time.monotonic() + self._spec.wait_s
        while True:
            try:
                self._store = self._connect(is_serving=is_serving)
                break
            except (RuntimeError, OSError) as err:
                if is_serving:
                    raise GroupLostError(f"cannot serve at {host}:{port}: {err}") from err
                if time.monotonic() >= deadline_s:
                    raise GroupLostError(
                        f"no node 0 at {host}:{port} within {self._spec.wait_s:.0f} s; start the"
                        " same command there with node_rank=0, or check the endpoint"
                    ) from err
            notify(f"waiting for node 0 at {host}:{port}")
            self._ended.wait(_RETRY_S)
        self._beating = threading.Thread(target=self._beat, name="foretoken-beat", daemon=True)
        self._beating.start()

    def close(self) -> None:
        """Leave; on node 0 the store ends."""
        self.stop_beating()
        self._store = None

    def stop_beating(self) -> None:
        """Give no more signs of life; the store may then end without a complaint."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join(_CONNECT_S)

    def say(self, key: str, content: Mapping[str, Any]) -> None:
        """Leave a message for the others.

        Raises:
            GroupLostError: the store is gone.

        """
        self._asking(lambda store: store.set(key, json.dumps(content)))

    def has(self, key: str) -> bool:
        """Return whether there is a message of that name.

        Raises:
            GroupLostError: the store is gone.

        """
        return bool(self._asking(lambda store: store.check([key])))

    def hear(
        self, key: str, sender: int, *, wait_s: float, notify: Notify = _log.debug
    ) -> dict[str, Any]:
        """Return the message of that name, once `sender` has left it.

        Raises:
            GroupLostError: it did not come in time, or the sender is gone.

        """
        start_s = told_s = time.monotonic()
        # Not the store's own wait: torch complains on stderr each time it ends without a key.
        while not self.has(key):
            now_s = time.monotonic()
            if now_s - start_s >= wait_s:
                raise GroupLostError(f"node {sender} did not answer within {wait_s:.0f} s")
            if now_s - told_s >= _NOTIFY_S:
                told_s = now_s
                self.check_alive(sender)
                notify(f"waiting for node {sender} of {self._spec.num_nodes}")
            time.sleep(_POLL_S)
        content: dict[str, Any] = json.loads(self._asking(lambda store: store.get(key)))
        return content

    def check_alive(self, node: int) -> None:
        """Check that a node that has come is still there.

        Raises:
            GroupLostError: it was silent for too long.

        """
        count = int(self._asking(lambda store: store.add(f"beat/{node}", 0)))
        known, since_s = self._beats.get(node, (0, 0.0))
        if count != known:
            self._beats[node] = (count, time.monotonic())
        elif known and time.monotonic() - since_s > self._spec.silent_s:
            silent_s = self._spec.silent_s
            raise GroupLostError(f"node {node} is silent for {silent_s:.0f} s; was it killed?")

    def _connect(self, *, is_serving: bool) -> Store:
        host, port = self._spec.address
        if not is_serving:
            # Where nobody listens yet, torch would write its stack on stderr at each attempt.
            with socket.create_connection((host, port), timeout=_CONNECT_S):
                pass
        store = connect_store(host, port, is_serving=is_serving, wait_s=_CONNECT_S)
        return PrefixStore(self._spec.prefix, store)

    def _connected(self) -> Store:
        if self._store is None:
            raise GroupLostError("the rendezvous is not open")
        return self._store

    def _asking(self, ask: Callable[[Store], Any]) -> Any:
        try:
            return ask(self._connected())
        except RuntimeError as err:
            raise GroupLostError(f"node 0 at {self._spec.endpoint} is gone: {err}") from err

    def _beat(self) -> None:
        # A connection of its own: one that waits for a key lets no other thread through.
        try:
            store = self._connect(is_serving=False)
            while not self._ended.wait(_BEAT_S):
                store.add(f"beat/{self._spec.node_rank}", 1)
        except (RuntimeError, OSError) as err:
            _log.debug("no more beats: %s", err)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """The ranks of one collective, seen by one of them."""

    ranks: tuple[int, ...]
    place: int
    group: distributed.ProcessGroup
    device: torch.device

    @property
    def next_rank(self) -> int:
        """The rank after this one in the ring."""
        return self.ranks[(self.place + 1) % len(self.ranks)]

    @property
    def previous_rank(self) -> int:
        """The rank before this one in the ring."""
        return self.ranks[self.place - 1]

    def agree(self, *values: float) -> list[float]:
        """Return the largest of all ranks for each value; all ranks have then come here."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group)
        return [float(value) for value in largest]


@dataclass(kw_only=True, slots=True)
class RankGroups:
    """All groups this rank has come across; each is made once, by all ranks together."""

    order: RankOrder
    device: torch.device
    _known: dict[tuple[int, ...], distributed.ProcessGroup] = field(default_factory=dict)

    @property
    def spec(self) -> GroupSpec:
        """The group of all ranks."""
        return self.order.group

    def join(self, devices_per_node: int, num_nodes: int) -> RankGroup | None:
        """Return the group of that shape; None where this rank is not in it.

        Raises:
            CollectiveTimingError: there are not as many ranks.
            RuntimeError: the ranks did not find each other.

        """
        ranks = ranks_of_group(devices_per_node, num_nodes, self.spec)
        if ranks not in self._known:
            timeout = timedelta(seconds=self.order.timeout_s)
            self._known[ranks] = distributed.new_group(list(ranks), timeout=timeout)
        if self.order.rank not in ranks:
            return None
        return RankGroup(
            ranks=ranks,
            place=ranks.index(self.order.rank),
            group=self._known[ranks],
            device=self.device,
        )
