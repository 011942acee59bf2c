"""What the blocks of requests contain, by name: equal names, equal content."""

from foretoken.simulator.serving.request_plan import RequestPlan

# A block's content and that of all before it.
Name = int
_ROOT: Name = 0


class BlockNames:
    """Names blocks of the KV cache by what the plan says of their content."""

    def __init__(self, plan: RequestPlan, block_size: int) -> None:
        self._plan = plan
        self._block_size = block_size
        self._names: dict[tuple[Name, object], Name] = {}

    def name_of(self, request: int, place: int, before: Name) -> Name:
        """Return the name of a block, given the name of the one before it (0: it is the first)."""
        key = (before, self._content_of(request, place))
        return self._names.setdefault(key, len(self._names) + 1)

    def _content_of(self, request: int, place: int) -> tuple[object, ...]:
        plan = self._plan
        first = place * self._block_size
        last = first + self._block_size - 1
        hash_first, hash_end = (int(plan.hash_offsets[request + i]) for i in (0, 1))
        if hash_end > hash_first and last // plan.hash_block_tokens < hash_end - hash_first:
            per_hash = plan.hash_block_tokens
            places = slice(hash_first + first // per_hash, hash_first + last // per_hash + 1)
            return ("hash", tuple(plan.hashes[places].tolist()))
        if last < plan.prefix_tokens[request]:
            return ("prefix", int(plan.prefix_stream[request]))
        return ("stream", int(plan.stream[request]))
