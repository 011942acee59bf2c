"""A run whose machines fail, followed event by event: what the formulas have to agree with."""

import math

import numpy as np

from foretoken.simulator.training.run.failures import FailureModel


def simulate_run(
    model: FailureModel, work_s: float, interval_s: float, generator: np.random.Generator
) -> float:
    """Return how long one run takes, in s: each failure and each checkpoint in turn."""

    def next_failure() -> float:
        rate = model.rate_per_s
        return generator.exponential(1 / rate) if rate else math.inf

    clock_s = safe_s = 0.0
    while True:
        failure_s = clock_s + next_failure()
        done_s, written = safe_s, []
        while clock_s < failure_s and done_s < work_s - 1e-9:
            passed_s = min(interval_s, work_s - done_s)
            done_s += passed_s
            clock_s += passed_s + model.stall_s
            written.append((clock_s + model.delay_s, done_s))
        if done_s >= work_s - 1e-9 and written[-1][0] <= failure_s:
            return written[-1][0]
        safe_s = max((work for moment_s, work in written if moment_s <= failure_s), default=safe_s)
        clock_s = failure_s
        while (failed_s := next_failure()) < model.restart_s:
            clock_s += failed_s
        clock_s += model.restart_s
