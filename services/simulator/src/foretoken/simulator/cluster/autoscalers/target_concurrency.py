"""Keep the requests on a replica, waiting or running, near a target.

The mean over the last `average_window_s` counts, as in Knative's stable mode; its panic mode is not
here. Source: Knative Serving documentation, autoscaling: 70 % of a concurrency of 100, a stable
window of 60 s.
"""

from collections import deque
from collections.abc import Mapping

from foretoken.simulator.cluster.autoscaling import PoolObservation, TargetTracker
from foretoken.simulator.serving.policy_options import PolicyOptions

_TARGET = 70.0
_AVERAGE_WINDOW_S = 60.0


class TargetConcurrencyAutoscaler:
    """Options: those of `TargetTracker`, `target` in requests, and `average_window_s`."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        read = PolicyOptions("autoscaling", options, (*TargetTracker.NAMES, "average_window_s"))
        self._tracker = TargetTracker(read, _TARGET)
        self._window_s = read.number("average_window_s", _AVERAGE_WINDOW_S)
        self._seen: deque[PoolObservation] = deque()

    def decide(self, observation: PoolObservation) -> int:
        """Return the replicas on which the mean is the target."""
        self._seen.append(observation)
        first_s = observation.now_s - self._window_s
        while len(self._seen) > 1 and self._seen[0].now_s <= first_s:
            self._seen.popleft()
        spans_s = [seen.interval_s for seen in self._seen]
        request_s = sum(seen.mean_outstanding * seen.interval_s for seen in self._seen)
        return self._tracker.decide(observation, request_s / sum(spans_s))


AUTOSCALER = TargetConcurrencyAutoscaler
