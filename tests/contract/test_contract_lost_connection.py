"""A stream whose connection breaks before its first row is asked for again, or ends with an error.

What gRPC retries by itself may wait for its deadline instead, where the first try was sent and the
last finds nobody.
"""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pyarrow as pa
import pytest
from loopback import serve

from foretoken.catalog import servicer
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import ForetokenError, ServiceUnavailableError
from foretoken.domain.measurements.measurement import ArrowStream, SqlQuery
from foretoken.wire.arrow import read_table

_ROWS = pa.table({"a": [1, 2, 3]})
_QUERY = SqlQuery(text="SELECT 1")


class _Cable:
    """A port whose connections lead to another, until it is cut."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._lock, self._is_cut = threading.Lock(), False
        self.address = "{}:{}".format(*self._listening.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break what is connected, and take no more."""
        with self._lock:
            self._is_cut = True
            ends = (self._listening, *self._ends)
        for end in ends:
            with contextlib.suppress(OSError):  # the other side was quicker
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def break_connections(self) -> None:
        """Break what is connected; who connects anew gets through."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                with contextlib.ExitStack() as undo:
                    undo.enter_context(near)
                    far = undo.enter_context(socket.create_connection(self._target))
                    with self._lock:
                        if self._is_cut:
                            return
                        self._ends += [near, far]
                    undo.pop_all()
                for one, other in itertools.permutations((near, far)):
                    threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65_536):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_RDWR)


class _SlowCatalog:
    """A catalog that does something to its connection before it answers its first query."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.disturb: Callable[[], None] = lambda: None
        self.may_answer = threading.Event()

    def query_sql(self, query: SqlQuery, on_leave: object = None) -> ArrowStream:
        """Return some rows."""
        del query, on_leave
        self.num_asked += 1
        if self.num_asked == 1:
            self.disturb()
            self.may_answer.wait()
        return _ROWS.to_reader()


def _register(server: grpc.Server, catalog: _SlowCatalog) -> None:
    servicer.register(server, catalog)  # type: ignore[arg-type]


@pytest.fixture
def catalog() -> Iterator[_SlowCatalog]:
    catalog = _SlowCatalog()
    yield catalog
    catalog.may_answer.set()


@pytest.fixture
def cable(catalog: _SlowCatalog) -> Iterator[_Cable]:
    with serve(_register, catalog) as options:
        cable = _Cable(options.address)
        yield cable
        cable.cut()
        catalog.may_answer.set()


@pytest.fixture
def options(cable: _Cable) -> ChannelOptions:
    return ChannelOptions(address=cable.address, reconnect_delay_s=0.01, stream_deadline_s=60.0)


def _ask(options: ChannelOptions) -> pa.Table:
    with CatalogClient.connect(options) as client:
        return read_table(client.query_sql(_QUERY))


def test_a_service_that_stays_away_is_said_to(
    catalog: _SlowCatalog, cable: _Cable, options: ChannelOptions
) -> None:
    catalog.disturb = cable.cut
    with pytest.raises(ServiceUnavailableError, match="cannot be reached"):
        _ask(options)
    assert 1 == catalog.num_asked


def test_a_service_that_comes_back_is_asked_again(
    catalog: _SlowCatalog, cable: _Cable, options: ChannelOptions
) -> None:
    catalog.disturb = cable.break_connections
    assert _ROWS == _ask(replace(options, reconnect_delay_s=0.3))
    assert 2 == catalog.num_asked


def test_the_deadline_holds_for_all_tries_together(
    catalog: _SlowCatalog, cable: _Cable, options: ChannelOptions
) -> None:
    """A wait that would outlast it is not begun."""
    catalog.disturb = cable.break_connections
    with pytest.raises(ForetokenError, match="cannot be reached"):
        _ask(replace(options, stream_deadline_s=9.0, reconnect_delay_s=10.0))
    assert 1 == catalog.num_asked
