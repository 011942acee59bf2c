"""What a job does while a service that it needs is away: it waits, and goes on from there."""

import logging
import time
from collections.abc import Callable

from foretoken.domain.errors import ServiceUnavailableError
from foretoken.jobs.progress import JobProgress

_log = logging.getLogger(__name__)

# With delays that double up to the limit, a service may be away for a minute and a half.
_MAX_TRIES = 8
_MAX_DELAY_S = 30.0
# What went on for so long before it is away has come back meanwhile.
_LONG_S = 120.0


def do_patiently(
    work: Callable[[JobProgress], object],
    progress: JobProgress,
    first_delay_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> object:
    """Return what the work returns, which is begun again where a service could not be reached.

    Raises:
        ServiceUnavailableError: one was away for too long, or it is no other service's error.
        CancelledJobError: the job was cancelled while it waited.

    """
    num_losses = 0
    while True:
        begun_s = clock()
        try:
            return work(progress)
        except ServiceUnavailableError as err:
            num_losses = 1 if clock() - begun_s > _LONG_S else num_losses + 1
            if "peer" not in err.details or num_losses >= _MAX_TRIES:
                raise
            delay_s = min(first_delay_s * 2.0 ** (num_losses - 1), _MAX_DELAY_S)
            _log.warning("job waits job_id=%s delay_s=%g: %s", progress.job_id, delay_s, err)
            progress.wait(delay_s, f"waits for the {err.details['peer']}")
