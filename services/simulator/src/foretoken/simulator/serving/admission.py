"""What schedulers share that compute a prompt as a whole, and give it all its blocks at once."""

from foretoken.simulator.serving.batch import Batch, Queues
from foretoken.simulator.serving.kv_cache import Prefix
from foretoken.simulator.serving.request import SimRequest


def can_admit(batch: Batch, queues: Queues) -> bool:
    """Whether a request waits that may join those that run."""
    return (
        bool(queues.waiting)
        and len(queues.running) < batch.budget.rules.max_num_seqs
        and batch.num_tokens_left > 0
        and batch.can_schedule(queues.waiting[0])
    )


def find_uncached(batch: Batch, request: SimRequest) -> tuple[Prefix, int]:
    """Return what is there of a waiting request, and how many of its tokens are to compute."""
    if request.is_swapped:
        return Prefix(), request.num_uncomputed
    found = batch.kv.find_prefix(request)
    return found, request.num_tokens - found.num_blocks * batch.kv.block_size


def fit_whole(batch: Batch, num_tokens: int) -> int:
    """Return how many tokens of a prompt to compute now: all, or 0 where the budget is too small.

    One that is longer than a whole budget is computed in pieces.
    """
    most = batch.num_tokens_left
    if most < num_tokens <= batch.budget.rules.max_num_batched_tokens:
        return 0
    return min(num_tokens, most)


def continue_prompts(batch: Batch, queues: Queues) -> bool:
    """Schedule the next pieces of prompts that were begun; False where there are none."""
    has_any = False
    for request in queues.running:
        if not request.is_decoding and batch.can_schedule(request):
            num_new = batch.limit_piece(request.num_uncomputed)
            if num_new > 0:
                batch.schedule(request, num_new)
                has_any = True
    return has_any


def decode_running(batch: Batch, queues: Queues, num_spare: int = 0) -> None:
    """Schedule every decoding request in order; the last running one is preempted for it.

    A request needs `num_spare` free blocks even where its own has room, unless it runs alone.
    """
    index = 0
    while index < len(queues.running) and batch.num_tokens_left > 0:
        request = queues.running[index]
        index += 1
        if (
            request.is_decoding
            and batch.can_schedule(request)
            and _give_block(batch, queues, request, num_spare)
        ):
            batch.schedule(request, min(1 + request.num_draft, batch.num_tokens_left))


def _give_block(batch: Batch, queues: Queues, request: SimRequest, num_spare: int) -> bool:
    """Make room for a request's next tokens; False where it is itself preempted for that."""
    num_tokens = request.num_kv_tokens_next
    while True:
        is_short = batch.kv.num_free < num_spare and len(queues.running) > 1
        if not is_short and batch.kv.allocate(request, num_tokens, batch.budget.now_ns):
            return True
        if batch.preempt(queues, -1) is request:
            return False
