"""LoRA adapters in the memory of an engine's devices, and the requests that wait for one."""

from collections import OrderedDict
from collections.abc import Sequence

from foretoken.simulator.engine.layout import NEVER_NS
from foretoken.simulator.workload.request_plan import NONE


class AdapterCache:
    """Room for `max_loaded` adapters, which load one after the other in `load_ns` each.

    A request waits until its adapter is there, and keeps it there until it is released. Where
    there is no room the adapter that was used least recently gives way, of those no request is
    using. Adapters load in the order in which they were first asked for; a request whose adapter is
    there passes those that wait for a load.
    """

    def __init__(self, max_loaded: int, load_ns: int) -> None:
        self._max_loaded = max_loaded
        self._load_ns = load_ns
        # Requests using each adapter that is there, the least recently used first.
        self._num_users: OrderedDict[int, int] = OrderedDict()
        # Requests that wait for each adapter that is not, the first asked for first.
        self._waiting: OrderedDict[int, dict[int, None]] = OrderedDict()
        self._ready: list[int] = []
        self._adapter_of: dict[int, int] = {}
        self._loading, self._loaded_ns = NONE, NEVER_NS
        self.num_loads = 0
        self.num_waiting = 0

    @property
    def next_ns(self) -> int:
        """When a load ends next; NEVER_NS where none is under way."""
        return self._loaded_ns

    @property
    def held(self) -> frozenset[int]:
        """Adapters that take room: those that are there, and one that loads."""
        return frozenset((*self._num_users, self._loading)) - {NONE}

    def ask(self, request: int, adapter: int, now_ns: int) -> None:
        """Let a request wait for its adapter; `take_ready` returns it when it is there."""
        self._adapter_of[request] = adapter
        if adapter in self._num_users:
            self._start(request, adapter)
            return
        self._waiting.setdefault(adapter, {})[request] = None
        self.num_waiting += 1
        self._load_next(now_ns)

    def take_ready(self, now_ns: int) -> Sequence[int]:
        """Return the requests that may start now and were not returned before."""
        if self._loaded_ns <= now_ns:
            adapter, self._loading, self._loaded_ns = self._loading, NONE, NEVER_NS
            self._num_users[adapter] = 0
            waited = self._waiting.pop(adapter, {})
            self.num_waiting -= len(waited)
            for request in waited:
                self._start(request, adapter)
            self._load_next(now_ns)
        ready, self._ready = self._ready, []
        return ready

    def release(self, request: int, now_ns: int) -> None:
        """Let go of the adapter of a request that has left the engine, waiting or started."""
        adapter = self._adapter_of.pop(request)
        waiting = self._waiting.get(adapter, {})
        if request in waiting:
            del waiting[request]
            self.num_waiting -= 1
            if not waiting:
                del self._waiting[adapter]
            return
        if request in self._ready:
            self._ready.remove(request)
        self._num_users[adapter] -= 1
        self._num_users.move_to_end(adapter)
        self._load_next(now_ns)

    def clear(self) -> Sequence[int]:
        """Forget everything, as a device does that fails; return the requests that waited."""
        waiting = [request for requests in self._waiting.values() for request in requests]
        self._num_users.clear()
        self._waiting.clear()
        self._ready.clear()
        self._adapter_of.clear()
        self._loading, self._loaded_ns = NONE, NEVER_NS
        self.num_waiting = 0
        return waiting

    def _start(self, request: int, adapter: int) -> None:
        self._num_users[adapter] += 1
        self._num_users.move_to_end(adapter)
        self._ready.append(request)

    def _load_next(self, now_ns: int) -> None:
        """Begin to load what was asked for first, if the link is free and there is room."""
        if self._loading != NONE or not self._waiting or not self._make_room():
            return
        self._loading, self._loaded_ns = next(iter(self._waiting)), now_ns + self._load_ns
        self.num_loads += 1

    def _make_room(self) -> bool:
        if len(self._num_users) < self._max_loaded:
            return True
        unused = next((each for each, num in self._num_users.items() if num == 0), NONE)
        self._num_users.pop(unused, None)
        return unused != NONE
