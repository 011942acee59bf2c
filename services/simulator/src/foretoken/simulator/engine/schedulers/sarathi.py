"""Decoding requests first; the rest of a step of fixed size is filled with pieces of prompts.

A prompt gets all its blocks on admission, less a watermark. When blocks run out, the latest
running request is preempted. Source: Agrawal et al., Sarathi-Serve, OSDI 2024, algorithm 3, and
microsoft/vidur, sarathi_replica_scheduler.py.
"""

from foretoken.simulator.engine.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    num_repeats_above,
    num_uncached,
)
from foretoken.simulator.engine.batch import admit, can_fit, limit_piece, num_known
from foretoken.simulator.engine.block import find_prefix
from foretoken.simulator.engine.choice import scheduler
from foretoken.simulator.engine.layout import State
from foretoken.simulator.engine.view import engines_of


@scheduler
def select(state: State, e: int) -> int:
    """Choose a token for each that decodes, and fill the step with pieces of prompts.

    Returns for how many steps it would choose the same while all that runs decodes.
    """
    decode_running(state, e, 1)
    continue_prompts(state, e)
    while can_admit(state, e):
        r = engines_of(state)[e].first_waiting
        num_hits = find_prefix(state, e, r)
        num_held = num_known(state, r)
        if not can_fit(state, e, num_hits, num_held):
            break
        admit(state, e, num_hits, num_held, limit_piece(state, e, num_uncached(state, r, num_hits)))
    return num_repeats_above(state, e, 1)
