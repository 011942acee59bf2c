"""Memory below the device's for KV blocks."""

from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError, positive


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTier:
    """Memory below the device's that keeps KV blocks it had to give up: host memory, an NVMe disk.

    Transfers queue on the tier's link, `read_bytes_per_s` towards the device and
    `write_bytes_per_s` away from it. Engines that preempt by swapping swap to the first tier.

    One that `is_shared` is a store of all replicas, `capacity_bytes` in all, with a link of its own
    for each device; a block is written when the step that fills it begins. Source: Qin et al.,
    Mooncake, 2024, section 3; LMCache, docs/kv_cache/storage_backends.
    """

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    is_shared: bool = False

    def __post_init__(self) -> None:
        """Refuse tiers that hold or move nothing."""
        checks = positive(self, "capacity_bytes", "read_bytes_per_s", "write_bytes_per_s")
        InvalidRequestError.check(f"tier {self.name}", checks)
