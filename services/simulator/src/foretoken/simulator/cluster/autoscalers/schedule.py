"""Follow a table of times."""

from bisect import bisect_right
from collections.abc import Mapping

from foretoken.simulator.cluster.autoscaling import PoolObservation
from foretoken.simulator.serving.policy_options import PolicyOptions


class ScheduleAutoscaler:
    """Options: `times_s`, ascending, the `replicas` from each on, and `period_s` (0: never again).

    Before the first time there are as many as there were, or with a period those of the last.
    """

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        read = PolicyOptions("autoscaling", options, ("times_s", "replicas", "period_s"))
        self._times_s = read.numbers("times_s")
        replicas = read.numbers("replicas")
        self._period_s = read.number("period_s", 0.0)
        if list(self._times_s) != sorted(set(self._times_s)):
            raise read.error("times_s", "must be ascending")
        if self._period_s and self._times_s[-1] >= self._period_s:
            raise read.error("times_s", f"must be within the period of {self._period_s:g} s")
        if len(replicas) != len(self._times_s):
            raise read.error("replicas", f"give one for each of {len(self._times_s)} times")
        if not all(number.is_integer() for number in replicas):
            raise read.error("replicas", "must be whole numbers")
        self._replicas = tuple(int(number) for number in replicas)

    def decide(self, observation: PoolObservation) -> int:
        """Return the replicas of the time that was last."""
        now_s = observation.now_s % self._period_s if self._period_s else observation.now_s
        place = bisect_right(self._times_s, now_s) - 1
        if place < 0 and not self._period_s:
            return observation.num_replicas
        return self._replicas[place]


AUTOSCALER = ScheduleAutoscaler
