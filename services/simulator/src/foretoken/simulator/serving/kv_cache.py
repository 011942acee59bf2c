"""The paged KV cache of an engine: free blocks by last use, full ones by content."""

from collections import OrderedDict
from dataclasses import dataclass, field

from foretoken.domain.units import ceil_divide
from foretoken.simulator.serving.content import BlockNames, Name
from foretoken.simulator.serving.kv_store import KvStore
from foretoken.simulator.serving.request import SimRequest


@dataclass(slots=True)
class Prefix:
    """What is there already of a request: blocks on the device, then names in the tiers below.

    `num_idle` of the blocks count as free, as nobody uses them. `name` is that of the last block.
    """

    blocks: list[int] = field(default_factory=list)
    stored: list[Name] = field(default_factory=list)
    num_idle: int = 0
    name: Name = 0

    @property
    def num_blocks(self) -> int:
        """Blocks whose content need not be computed."""
        return len(self.blocks) + len(self.stored)


class KvCache:
    """Blocks of `block_size` tokens; without names none is found again.

    A block that nobody uses keeps its content until it is the longest unused one and taken; then
    the store, if there is one, gets it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        names: BlockNames | None = None,
        store: KvStore | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.store = store
        self._names = names
        # Blocks that were never used are taken first, in order, and known by their number alone: a
        # cache may have millions. One more user count for each block taken.
        self._num_users: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()
        self._name_of: dict[int, Name] = {}
        self._blocks_of: dict[Name, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody uses, whatever they contain."""
        return self.num_blocks - len(self._num_users) + len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held by requests."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return int(ceil_divide(num_tokens, self.block_size))

    def can_ever_hold(self, request: SimRequest) -> bool:
        """Whether the whole request fits into an empty cache."""
        return self.blocks_for(request.num_kv_tokens_max) <= self.num_blocks

    def find_prefix(self, request: SimRequest) -> Prefix:
        """Return the leading blocks of a request without blocks that need not be computed.

        Its last token is always to compute.
        """
        found = Prefix()
        if self._names is None:
            return found
        for place in range((request.num_tokens - 1) // self.block_size):
            name = self._names.name_of(request.index, place, found.name)
            holders = self._blocks_of.get(name)
            if holders and not found.stored:
                block = next(iter(holders))
                found.blocks.append(block)
                found.num_idle += self._num_users[block] == 0
            elif self.store and self.store.has(name):
                found.stored.append(name)
            else:
                break
            found.name = name
        return found

    def allocate(self, request: SimRequest, num_tokens: int, now_ns: int = 0) -> bool:
        """Give a request blocks for that many tokens in all, or nothing and False."""
        num_missing = self.blocks_for(num_tokens) - request.num_blocks
        if num_missing > self.num_free:
            return False
        for _ in range(num_missing):
            request.blocks.append(self._take_free(now_ns))
        return True

    def take_prefix(self, request: SimRequest, found: Prefix, now_ns: int = 0) -> None:
        """Give a request what was found for it; blocks for what is stored must be free."""
        for block in found.blocks:
            self._free.pop(block, None)
            self._num_users[block] += 1
        request.blocks = list(found.blocks)
        request.num_named = len(found.blocks)
        request.name = self._name_of[found.blocks[-1]] if found.blocks else 0
        request.num_computed = found.num_blocks * self.block_size
        request.num_cached += request.num_computed
        if found.stored and self.store:
            request.num_loaded += len(found.stored) * self.block_size
            request.loaded_ns = self.store.load(found.stored, now_ns)
            self.allocate(request, request.num_computed, now_ns)
            self.name_blocks(request)

    def name_blocks(self, request: SimRequest) -> None:
        """Let the full blocks of a request be found by their content."""
        if self._names is None:
            return
        for place in range(request.num_named, request.num_computed // self.block_size):
            request.name = self._names.name_of(request.index, place, request.name)
            block = request.blocks[place]
            self._name_of[block] = request.name
            self._blocks_of.setdefault(request.name, {})[block] = None
            request.num_named += 1

    def free(self, request: SimRequest) -> None:
        """Take back all blocks of a request; those of its beginning are kept longest."""
        for block in reversed(request.blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._free[block] = None
        request.blocks = []
        request.num_named = 0
        request.name = 0

    def _take_free(self, now_ns: int) -> int:
        """Give the longest unused block, without its content, to one user."""
        if len(self._num_users) < self.num_blocks:
            self._num_users.append(1)
            return len(self._num_users) - 1
        block, _ = self._free.popitem(last=False)
        self._forget(block, now_ns)
        self._num_users[block] = 1
        return block

    def _forget(self, block: int, now_ns: int) -> None:
        """Give up the content of a block."""
        name = self._name_of.pop(block, None)
        if name is None:
            return
        del self._blocks_of[name][block]
        if not self._blocks_of[name]:
            del self._blocks_of[name]
            if self.store:
                self.store.put(name, now_ns)
