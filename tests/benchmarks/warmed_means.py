"""Means over the requests of a report that come after those which warm a server up."""

import numpy as np

from foretoken.domain.results.report import RequestColumns


def mean_latencies_ms(requests: RequestColumns, num_warmup: int) -> tuple[float, float]:
    """Return mean TTFT and TPOT in ms of all requests but the first to arrive."""
    arrival_s, first_s, last_s, num_tokens = (
        np.asarray(column)[num_warmup:]
        for column in (
            requests.arrival_s,
            requests.first_token_s,
            requests.finished_s,
            requests.num_decode_tokens,
        )
    )
    gaps_s = (last_s - first_s) / (num_tokens - 1)
    return 1000 * float((first_s - arrival_s).mean()), 1000 * float(gaps_s.mean())
