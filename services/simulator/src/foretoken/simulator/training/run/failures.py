"""Expected time of a run whose machines fail, and the checkpoint interval that loses least.

Failures come at a constant rate. Training goes on for an interval, then a checkpoint holds it up;
after a failure the run is down for the restart, which may fail as well, and begins again from the
last checkpoint that was wholly written. A checkpoint written during training is safe only some time
after it was begun, so a failure meanwhile costs the interval before it too.

Source: Young, "A First Order Approximation to the Optimum Checkpoint Interval", CACM 17(9), 1974;
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3),
2006, whose complete cost function this is where nothing is written during training.
"""

import math
from dataclasses import dataclass

# Less than one attempt in e to this power succeeds: no run ever ends.
_MAX_EXPONENT = 15.0
_NUM_BISECTIONS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureModel:
    """How often a run fails and what that costs.

    `rate_per_s` counts failures of the whole run. A checkpoint holds training up for `stall_s` and
    is safe `delay_s` after that, while training goes on.
    """

    rate_per_s: float = 0.0
    restart_s: float = 0.0
    stall_s: float = 0.0
    delay_s: float = 0.0

    @property
    def shortest_s(self) -> float:
        """The shortest interval: one checkpoint is written at a time."""
        return max(0.0, self.delay_s - self.stall_s)

    def best_interval(self) -> float:
        """Return the interval of training between checkpoints that loses least, in s.

        Infinite where nothing fails. It minimises the expected time of a segment over its training
        exactly, which is where (1 - x) e^x = e^(-rate stall) for x = rate interval.
        """
        if self.rate_per_s == 0:
            return math.inf
        wanted = -self.rate_per_s * self.stall_s
        low, high = 0.0, 1.0
        for _ in range(_NUM_BISECTIONS):
            middle = (low + high) / 2
            if math.log1p(-middle) + middle > wanted:
                low = middle
            else:
                high = middle
        return max(low / self.rate_per_s, self.shortest_s)

    def can_end(self, interval_s: float) -> bool:
        """Return whether a run gets through an interval in any time worth naming."""
        longest_s = max(interval_s + self.stall_s + self.delay_s, self.restart_s)
        return self.rate_per_s * longest_s < _MAX_EXPONENT

    def expect_run(self, work_s: float, interval_s: float) -> "ExpectedRun":
        """Return the expected time of `work_s` of training with a checkpoint at its end.

        An infinite interval writes no checkpoint but the last.
        """
        interval_s = min(interval_s, work_s)
        num_whole, rest_s = divide_work(work_s, interval_s)
        lengths = [(num_whole, interval_s + self.stall_s)]
        if rest_s:
            lengths.append((1, rest_s + self.stall_s))
        rate, delay_s = self.rate_per_s, self.delay_s
        num_segments = sum(count for count, _ in lengths)
        stalls_s = num_segments * self.stall_s + delay_s
        if rate == 0:
            return ExpectedRun(interval_s=interval_s, work_s=work_s, checkpoint_s=stalls_s)
        # Failures of training: those of each segment, and of waiting for the last checkpoint.
        num_failed = math.expm1(rate * delay_s) + math.exp(rate * delay_s) * sum(
            count * math.expm1(rate * length_s) for count, length_s in lengths
        )
        return ExpectedRun(
            interval_s=interval_s,
            work_s=work_s,
            checkpoint_s=stalls_s,
            repeated_s=max(0.0, num_failed / rate - work_s - stalls_s),
            restart_s=num_failed * math.expm1(rate * self.restart_s) / rate,
            num_failures=num_failed * math.exp(rate * self.restart_s),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedRun:
    """Where the expected time of a run goes; `num_failures` counts those of restarts too."""

    interval_s: float
    work_s: float
    checkpoint_s: float = 0.0
    repeated_s: float = 0.0
    restart_s: float = 0.0
    num_failures: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.work_s + self.checkpoint_s + self.repeated_s + self.restart_s


def divide_work(work_s: float, interval_s: float) -> tuple[int, float]:
    """Return how many whole intervals the work has, and what is left over."""
    num_whole = math.floor(work_s / interval_s * (1 + 1e-12))
    rest_s = work_s - num_whole * interval_s
    return (num_whole, rest_s) if rest_s > 1e-9 * interval_s else (num_whole, 0.0)
