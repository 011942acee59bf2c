"""Memory below the device's for KV blocks: tiers in a row, each behind a link with a queue."""

from collections import OrderedDict
from collections.abc import Sequence

from foretoken.domain.engine import KvTier
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.serving.content import Name


class _Tier:
    def __init__(self, spec: KvTier, bytes_per_block: int) -> None:
        self.capacity = spec.capacity_bytes // bytes_per_block
        self.read_ns = round(bytes_per_block / spec.read_bytes_per_s * NS_PER_S)
        self.write_ns = round(bytes_per_block / spec.write_bytes_per_s * NS_PER_S)
        self.read_free_ns = 0
        self.write_free_ns = 0
        self.num_swapped = 0
        # When each block has been written, the longest unused first.
        self.written_ns: OrderedDict[Name, int] = OrderedDict()

    def read(self, num_blocks: int, now_ns: int) -> int:
        self.read_free_ns = max(self.read_free_ns, now_ns) + num_blocks * self.read_ns
        return self.read_free_ns

    def write(self, num_blocks: int, now_ns: int) -> int:
        self.write_free_ns = max(self.write_free_ns, now_ns) + num_blocks * self.write_ns
        return self.write_free_ns


class KvStore:
    """Keeps the blocks an engine gives up: a full tier hands its longest unused to the next.

    Requests that are swapped out take room in the first tier, before kept blocks.
    """

    def __init__(self, tiers: Sequence[KvTier], bytes_per_block: int) -> None:
        self._tiers = [_Tier(tier, bytes_per_block) for tier in tiers]

    def has(self, name: Name) -> bool:
        """Whether a tier keeps a block of that content."""
        return any(name in tier.written_ns for tier in self._tiers)

    def put(self, name: Name, now_ns: int) -> None:
        """Keep a block that the device gives up; one that is kept already counts as used."""
        for tier in self._tiers:
            if name in tier.written_ns:
                tier.written_ns.move_to_end(name)
                return
        self._put_into(0, name, now_ns)

    def load(self, names: Sequence[Name], now_ns: int) -> int:
        """Read blocks that are kept; return when all are on the device."""
        done_ns = now_ns
        for name in names:
            tier = next(tier for tier in self._tiers if name in tier.written_ns)
            written_ns = tier.written_ns[name]
            tier.written_ns.move_to_end(name)
            done_ns = max(done_ns, tier.read(1, max(now_ns, written_ns)))
        return done_ns

    def can_swap_out(self, num_blocks: int) -> bool:
        """Whether the first tier has room for a request, if need be of kept blocks."""
        tier = self._tiers[0]
        return tier.num_swapped + num_blocks <= tier.capacity

    def swap_out(self, num_blocks: int, now_ns: int) -> None:
        """Write the blocks of a request to the first tier."""
        tier = self._tiers[0]
        tier.num_swapped += num_blocks
        tier.write(num_blocks, now_ns)
        self._make_room(0, now_ns)

    def swap_in(self, num_blocks: int, now_ns: int) -> int:
        """Read them back; return when they are there."""
        tier = self._tiers[0]
        tier.num_swapped -= num_blocks
        return tier.read(num_blocks, max(now_ns, tier.write_free_ns))

    def _put_into(self, level: int, name: Name, now_ns: int) -> None:
        if level == len(self._tiers):
            return
        tier = self._tiers[level]
        if tier.num_swapped >= tier.capacity:
            self._put_into(level + 1, name, now_ns)
            return
        tier.written_ns[name] = tier.write(1, now_ns)
        self._make_room(level, now_ns)

    def _make_room(self, level: int, now_ns: int) -> None:
        tier = self._tiers[level]
        while len(tier.written_ns) + tier.num_swapped > tier.capacity and tier.written_ns:
            name, _ = tier.written_ns.popitem(last=False)
            self._put_into(level + 1, name, now_ns)
