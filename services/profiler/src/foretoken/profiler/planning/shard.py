"""Split a plan among the pods of an Indexed Job."""

from collections.abc import Sequence
from typing import TypeVar

from foretoken.domain.errors import InvalidRequestError

T = TypeVar("T")


def take_shard(plan: Sequence[T], shard_index: int, num_shards: int) -> tuple[T, ...]:
    """Return every `num_shards`-th entry from `shard_index` on: shares of equal mix and size.

    All pods must make the plan from the same seed.

    Raises:
        InvalidRequestError: there is no such shard.

    """
    if not 0 <= shard_index < num_shards:
        raise InvalidRequestError.of_field(
            "shard_index", f"{shard_index} is not a share of {num_shards}"
        )
    return tuple(plan[shard_index::num_shards])
