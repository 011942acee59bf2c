"""What makes the highest rate of a load less sure than its interval says."""

from math import ceil, floor, log10

import numpy as np

from foretoken.simulator.search.capacity.load_search import AnswerInterval
from foretoken.simulator.search.capacity.resample import Resamples
from foretoken.simulator.serving.metrics import is_completed
from foretoken.simulator.serving.record import RequestRecord


def list_notes(
    requests: RequestRecord,
    capacity_rps: float,
    interval: AnswerInterval | None,
    tolerance_ratio: float,
    resamples: Resamples | None,
) -> tuple[str, ...]:
    """Return what to know of an answer; `requests` are those of the run at that rate.

    `interval` and `resamples` are None where no rate was seen to miss the targets.
    """
    low_rps = interval.sampling_low_rps if interval else capacity_rps
    width = max(1 - low_rps / capacity_rps, tolerance_ratio)
    notes = [_say_short(requests, capacity_rps, width)]
    if resamples is not None and not resamples.loads:
        notes.append(
            "the trace is too short to be cut into blocks, so the interval does not tell how far"
            " the answer rests on these very requests: give a longer trace"
        )
    return tuple(note for note in notes if note)


def unfinished_share(requests: RequestRecord) -> float:
    """Return the share of completed requests that were not complete when the last one arrived.

    What a deployment completed until then is all that the run shows it can keep up with: after it
    nothing comes that would have to wait. So the rate it bears for longer is at least the rate of
    the run less this share, and a queue that grows more slowly than that does not show.
    """
    done = is_completed(requests)
    finished_ns = np.asarray(requests.finished_ns)[done]
    last_ns = np.asarray(requests.arrival_ns).max()
    return float((finished_ns > last_ns).mean()) if len(finished_ns) else 1.0


def _say_short(requests: RequestRecord, capacity_rps: float, width: float) -> str:
    """Return that the requests are too few for the width of the interval, if they are."""
    share = unfinished_share(requests)
    if share <= width:
        return ""
    num_requests = len(requests.arrival_ns)
    # The share falls with the number of requests, the width with its root.
    enough = num_requests * (share / width) ** 2
    return (
        f"the workload is short: {share:.0%} of its {num_requests:,} requests were not finished"
        f" when the last one arrived, so a queue that grows may not show, and sure are only"
        f" {capacity_rps * (1 - share):.4g} requests/s; give it about {_round_up(enough):,}"
        " requests"
    )


def _round_up(number: float) -> int:
    """Return the next number of two digits and zeros."""
    unit = int(10 ** max(floor(log10(number)) - 1, 0))
    return ceil(number / unit) * unit
