"""One home, many processes: who has its catalog open serves it to those that come later.

The owner is the process that has DuckDB's lock. It listens on a socket in a folder of the home that
nobody but its user may enter, and serves the catalog over gRPC on another one there, from the
moment when a process first connects. A connection stays open, so that its end, however the owner
ended, is heard at once: then one of those that are left opens the catalog and serves it at the same
place, and calls under way find it by being made again.
"""

import contextlib
import json
import logging
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.domain.errors import CatalogBusyError, ForetokenError

if TYPE_CHECKING:
    from foretoken.catalog.service import CatalogService
    from foretoken.domain.ports import CatalogAdminPort

_OWNER, _CATALOG = "owner.sock", "catalog.sock"
# Of a socket's path; the least that a system has is 104 bytes.
_MAX_PATH_BYTES = 100
_OPEN_FILES = Path("/proc/self/fd")
# An owner that computes is slow to answer: the first to come waits until it has imported gRPC.
_ANSWER_S = 20.0
# How long an owner takes from the lock to its socket, and from its end to the lock's.
_TURNOVER_S, _TICK_S = 5.0, 0.05
_GRACE_S = 2.0

# Process, user and group, as Linux gives them.
_CREDENTIALS = struct.Struct("3i")

_log = logging.getLogger(__name__)


class CanConnect(Protocol):
    """Makes a client of the catalog at an address, and what closes it."""

    def __call__(self, address: str) -> "tuple[CatalogAdminPort, Callable[[], None]]":
        """Return both; nothing is sent yet."""


class SocketFolder:
    """The folder of the sockets, which its user alone may enter."""

    def __init__(self, path: Path) -> None:
        """Keep where it is or will be."""
        self.path = path.absolute()
        self._descriptor = -1

    def is_own(self) -> bool:
        """Tell whether it is there, and nobody else has put it there or can reach into it."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        is_private = not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_private

    def make(self) -> bool:
        """Make it where it is not there, and tell whether it can be used."""
        with contextlib.suppress(OSError):
            self.path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        return self.is_own()

    def place(self, name: str) -> str:
        """Return a path of a socket that is short enough for one.

        Raises:
            OSError: there is none on this system.

        """
        path = self.path / name
        if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
            return str(path)
        if self._descriptor < 0:
            if not _OPEN_FILES.exists():
                raise OSError(f"the path {path} is too long for a socket")
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        return str(_OPEN_FILES / str(self._descriptor) / name)

    def close(self) -> None:
        """Let go of the folder; paths that `place` returned are of no more use."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class OwnerConnection:
    """A connection to the process that has the catalog open."""

    def __init__(self, connected: socket.socket, pid: int) -> None:
        """Keep the connection, and whose it is."""
        self._socket = connected
        self.pid = pid

    @classmethod
    def find(cls, folder: SocketFolder) -> "OwnerConnection | None":
        """Return a connection to the owner, which serves by then; None where nobody answers."""
        if not hasattr(socket, "AF_UNIX") or not folder.is_own():
            return None
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(_ANSWER_S)
            connected.connect(folder.place(_OWNER))
            with connected.makefile("r", encoding="utf-8") as answer:
                pid = int(json.loads(answer.readline())["pid"])
            connected.settimeout(None)
        except (OSError, ValueError, KeyError):
            # Nobody listens: a socket that a killed process left refuses. Or it ends just now.
            connected.close()
            return None
        return cls(connected, pid)

    def wait(self) -> None:
        """Return when the owner has ended, or this was closed."""
        with contextlib.suppress(OSError):
            self._socket.recv(1)

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class CatalogOffer:
    """What an owner listens on; the catalog is served once somebody has connected."""

    def __init__(self, folder: SocketFolder, catalog: "CatalogService") -> None:
        """Keep the folder, and the catalog, which is open."""
        self._folder = folder
        self._catalog = catalog
        self._listener: socket.socket | None = None
        # A word at the first of the pair ends the wait for connections at the second.
        self._end: tuple[socket.socket, ...] = ()
        self._welcoming = threading.Thread()
        self._connected: list[socket.socket] = []
        self._serving: ExitStack | None = None
        self._starting = threading.Lock()

    def open(self) -> None:
        """Begin to listen; where that is not possible this process keeps the catalog to itself."""
        if not hasattr(socket, "AF_UNIX") or not self._folder.make():
            _log.info("the catalog is not shared: no private folder %s", self._folder.path)
            return
        listener = socket.socket(socket.AF_UNIX)
        try:
            # Only one process has the catalog's lock, so what is there is a dead one's.
            (self._folder.path / _OWNER).unlink(missing_ok=True)
            listener.bind(self._folder.place(_OWNER))
            listener.listen()
            # Who connected may be gone by the time it is accepted.
            listener.setblocking(False)
        except OSError as err:
            _log.info("the catalog is not shared: %s", err)
            listener.close()
            return
        self._listener, self._end = listener, socket.socketpair()
        self._welcoming = threading.Thread(
            target=self._welcome_all, args=(listener, self._end[1]), name="owner", daemon=True
        )
        self._welcoming.start()

    def serve(self) -> None:
        """Serve the catalog, unless it is served already.

        Raises:
            InvalidRequestError: there can be no socket.

        """
        with self._starting:
            if self._serving is None:
                # A process to which nobody connects waits for none of it.
                from foretoken.app.serve import serve_catalog_at

                address = f"unix:{self._folder.place(_CATALOG)}"
                self._serving = serve_catalog_at(address, self._catalog, _GRACE_S)

    def close(self) -> None:
        """Take no more calls; those under way may end."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._end[0].sendall(b"\n")
            self._welcoming.join()
            for end in self._end:
                end.close()
            (self._folder.path / _OWNER).unlink(missing_ok=True)
            listener.close()
        with self._starting:
            serving, self._serving = self._serving, ExitStack()
        if serving is not None:
            serving.close()

    def release(self) -> None:
        """Let the others know, once the catalog is closed."""
        for connected in self._connected:
            connected.close()

    def _welcome_all(self, listener: socket.socket, end: socket.socket) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(listener, selectors.EVENT_READ)
            waiting.register(end, selectors.EVENT_READ)
            while end not in {key.fileobj for key, _ in waiting.select()}:
                try:
                    self._welcome(listener.accept()[0])
                except BlockingIOError:
                    continue
                except (OSError, ForetokenError) as err:  # no file is left to open, or to serve at
                    _log.warning("the catalog could not be shared: %s", err)
                    time.sleep(_TICK_S)

    def _welcome(self, connected: socket.socket) -> None:
        for other in [other for other in self._connected if not _is_open(other)]:
            self._connected.remove(other)
            other.close()
        self._connected.append(connected)
        connected.setblocking(True)
        if self._listener is not None and _is_same_user(connected):
            self.serve()
            connected.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")


class SharedCatalog:
    """The catalog of a home: this process's own, or that of the process which has it open."""

    def __init__(
        self,
        folder: Path,
        open_service: "Callable[[], CatalogService]",
        connect: CanConnect,
        on_join: Callable[[int], None],
    ) -> None:
        """Keep what opens the catalog or a client of it; `on_join` is given the owner's process."""
        self._folder = SocketFolder(folder)
        self._open_service = open_service
        self._connect = connect
        self._on_join = on_join
        self._service: CatalogService | None = None
        self._offer: CatalogOffer | None = None
        self._owner: OwnerConnection | None = None
        self._client: tuple[CatalogAdminPort, Callable[[], None]] | None = None
        self._successor: threading.Thread | None = None
        self._changing = threading.Lock()
        self._is_closed = False

    @property
    def port(self) -> "CatalogAdminPort":
        """The catalog, which is open."""
        if self._client is not None:
            return self._client[0]
        if self._service is None:
            raise CatalogBusyError("the catalog is not open")
        return self._service

    def open(self, *, joins: bool = True) -> None:
        """Open the catalog, or with `joins` connect to the process that has it open.

        Raises:
            CatalogBusyError: another process has it open and does not serve it.
            ForetokenError: it cannot be opened.

        """
        owner = OwnerConnection.find(self._folder) if joins else None
        if owner is None:
            try:
                self._own()
            except CatalogBusyError:
                owner = self._wait_for_owner() if joins else None
                if owner is None:
                    raise
        if owner is not None:
            self._join(owner)

    def close(self) -> None:
        """Close what was opened; a process that is connected to this one takes over."""
        with self._changing:
            self._is_closed = True
            owner = self._owner
        if owner is not None:
            owner.close()
        if self._successor is not None:
            self._successor.join()
        with ExitStack() as closing:
            closing.callback(self._folder.close)
            if self._offer is not None:
                closing.callback(self._offer.release)
            if self._service is not None:
                closing.callback(self._service.close)
            if self._offer is not None:
                closing.callback(self._offer.close)
            if self._client is not None:
                closing.callback(self._client[1])

    def _own(self) -> None:
        self._service = self._open_service()
        self._offer = CatalogOffer(self._folder, self._service)
        self._offer.open()

    def _join(self, owner: OwnerConnection) -> None:
        self._owner = owner
        self._client = self._connect(f"unix:{self._folder.place(_CATALOG)}")
        self._successor = threading.Thread(target=self._succeed, name="successor", daemon=True)
        self._successor.start()
        self._on_join(owner.pid)

    def _wait_for_owner(self) -> OwnerConnection | None:
        end_s = time.monotonic() + _TURNOVER_S
        while time.monotonic() < end_s:
            if (owner := OwnerConnection.find(self._folder)) is not None:
                return owner
            time.sleep(_TICK_S)
        return None

    def _succeed(self) -> None:
        """Wait for the owner's end, and be the next one or find who is, until this is closed."""
        owner = self._owner
        while owner is not None or not self._is_closed:
            if owner is not None:
                owner.wait()
                owner.close()
            with self._changing:
                if self._is_closed:
                    return
                owner = self._owner = self._replace_owner()
                if self._offer is not None:
                    return
            if owner is None:
                time.sleep(_TICK_S)

    def _replace_owner(self) -> OwnerConnection | None:
        """Open and serve the catalog, or return a connection to the process that does by now."""
        try:
            self._own()
            if self._offer is not None:
                self._offer.serve()
                _log.info("the process that had the catalog open has ended; this one has it now")
        except CatalogBusyError:
            return OwnerConnection.find(self._folder)
        except ForetokenError as err:
            _log.warning("the catalog could not be taken over, and will be tried again: %s", err)
        return None


def _is_open(connected: socket.socket) -> bool:
    """Tell whether the other side is there; it never sends anything."""
    try:
        return bool(connected.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _is_same_user(connected: socket.socket) -> bool:
    """Tell whether the other side is of this user, where the system says so."""
    option: Any = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    )
    return bool(user == os.getuid())
