"""Memory below the device's for KV blocks."""

from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError, positive

# Behind a tier that replicas share, in the text of one.
_SHARED = "shared"


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTier:
    """Memory below the device's that keeps KV blocks it had to give up: host memory, an NVMe disk.

    `capacity_bytes` are those of a device. Transfers queue on its link, `read_bytes_per_s` towards
    the device and `write_bytes_per_s` away from it. Engines that preempt by swapping swap to the
    first tier.

    One that `is_shared` is a store of all replicas, `capacity_bytes` in all; a block is written
    when the step that fills it begins. Source: Qin et al., Mooncake, 2024, section 3; LMCache,
    docs/kv_cache/storage_backends.
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


def read_tiers(text: str) -> tuple[KvTier, ...]:
    """Return the tiers of a text, `cpu:64e9:25e9+disk:1e12:5e9`; `none` is none.

    Of each its name, bytes and bytes per second, either way, and `shared` for a store of replicas.

    Raises:
        InvalidRequestError: a part says something else.

    """
    return () if text == "none" else tuple(map(_read_tier, text.split("+")))


def _read_tier(text: str) -> KvTier:
    words = text.split(":")
    is_shared = words[-1] == _SHARED
    words = words[: len(words) - is_shared]
    try:
        name, capacity, speed = words
        return KvTier(
            name=name,
            capacity_bytes=int(float(capacity)),
            read_bytes_per_s=float(speed),
            write_bytes_per_s=float(speed),
            is_shared=is_shared,
        )
    except (ValueError, OverflowError) as err:
        why = f"{text!r}: write NAME:BYTES:BYTES_PER_S, with :shared for a store of all replicas"
        raise InvalidRequestError.of_field("kv_tiers", why) from err
