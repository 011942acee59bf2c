"""The paged KV cache of one replica, as counts of blocks."""

from foretoken.domain.units import ceil_divide
from foretoken.simulator.serving.request import SimRequest


class KvCache:
    """Blocks of `block_size` tokens. Without prefix sharing all blocks are alike, so counts do."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks

    @property
    def num_used(self) -> int:
        """Blocks held by requests."""
        return self.num_blocks - self.num_free

    def can_ever_hold(self, request: SimRequest) -> bool:
        """Whether the whole request fits into an empty cache."""
        return request.num_kv_tokens_max <= self.num_blocks * self.block_size

    def allocate(self, request: SimRequest, num_new_tokens: int) -> bool:
        """Give a request the blocks for `num_new_tokens` more tokens, or nothing and False."""
        num_blocks = ceil_divide(request.num_computed + num_new_tokens, self.block_size)
        num_missing = num_blocks - request.num_blocks
        if num_missing > self.num_free:
            return False
        if num_missing > 0:
            self.num_free -= num_missing
            request.num_blocks = num_blocks
            request.num_slots = num_blocks * self.block_size
        return True

    def free(self, request: SimRequest) -> None:
        """Take back all blocks of a request."""
        self.num_free += request.num_blocks
        request.num_blocks = 0
        request.num_slots = 0
