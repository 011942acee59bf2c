"""Keep the requests that wait for a replica near a target.

An empty queue wants the fewest replicas, so what runs is never counted; the window for scaling
down is what keeps replicas. Source of the target: llm-d's workload variant autoscaler takes a
replica with 5 requests waiting as saturated (`queueLengthThreshold`).
"""

from collections.abc import Mapping

from foretoken.simulator.cluster.autoscaling import PoolObservation, TargetTracker
from foretoken.simulator.serving.policy_options import PolicyOptions

_TARGET = 5.0


class QueueLengthAutoscaler:
    """Options: those of `TargetTracker`, `target` in requests that wait per replica."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        read = PolicyOptions("autoscaling", options, TargetTracker.NAMES)
        self._tracker = TargetTracker(read, _TARGET)

    def decide(self, observation: PoolObservation) -> int:
        """Return the replicas over which what waits now is the target each."""
        return self._tracker.decide(observation, observation.num_waiting_requests)


AUTOSCALER = QueueLengthAutoscaler
