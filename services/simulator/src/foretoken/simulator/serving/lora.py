"""LoRA adapters: which request uses which, those in device memory, and the wait for one."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.lowering.graph import BatchShape, RankContext
from foretoken.domain.lowering.lora import adapter_bytes, adapter_shares
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.requests.cluster import LoraSpec
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.engine.layout import NEVER_NS
from foretoken.simulator.grid import Ints
from foretoken.simulator.workload.request_plan import NONE, RequestPlan
from foretoken.simulator.workload.rng import named_stream


def assign_adapters(plan: RequestPlan, lora: LoraSpec | None, seed: int) -> RequestPlan:
    """Return the plan with the adapter of each request, drawn by popularity.

    Requests of a session ask for the same one. The KV cache of equal text under two adapters
    differs, so content that they shared has a name for each.
    """
    if lora is None:
        return plan
    sessions, session = np.unique(plan.stream, return_inverse=True)
    # By inversion: what one session draws does not depend on how many there are.
    bounds = np.cumsum(adapter_shares(lora))
    drawn = np.searchsorted(bounds, named_stream(seed, "lora").random(len(sessions)), "right")
    adapter = np.minimum(drawn, lora.num_adapters - 1)[session].astype(np.int64)
    prefix = np.where(
        plan.prefix_stream == NONE, NONE, plan.prefix_stream * lora.num_adapters + adapter
    )
    return replace(plan, adapter=adapter, prefix_stream=prefix, hashes=_hashes_apart(plan, adapter))


def adapter_load_ns(lora: LoraSpec, options: LoweringOptions, ranks: Sequence[RankContext]) -> int:
    """Return how long an adapter takes to load: that of the device which holds most of one.

    Devices load at the same time, each over its own link. `ranks` are one of every stage.

    Raises:
        InvalidRequestError: the layout does not fit the model.

    """
    held = max(adapter_bytes_of_rank(lora, options, rank) for rank in ranks)
    return round(held / lora.load_bytes_per_s * NS_PER_S)


def adapter_bytes_of_rank(lora: LoraSpec, options: LoweringOptions, rank: RankContext) -> float:
    """Return the bytes of one adapter on a rank."""
    one = BatchShape(num_tokens=1, num_output_rows=1, num_group_tokens=1)
    return adapter_bytes(lower_rank(one, replace(options, lora=lora), rank), lora)


def _hashes_apart(plan: RequestPlan, adapter: Ints) -> Ints:
    if len(plan.hashes) == 0:
        return plan.hashes
    owners = np.repeat(adapter, np.diff(plan.hash_offsets))
    pairs = np.stack((plan.hashes, owners))
    return np.unique(pairs, axis=1, return_inverse=True)[1].astype(np.int64).reshape(-1)


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
