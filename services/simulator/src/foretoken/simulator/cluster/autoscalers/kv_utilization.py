"""Keep the share of KV cache blocks in use near a target.

Source of the target: llm-d's workload variant autoscaler takes a replica with 80 % of its KV cache
in use as saturated (`kvCacheThreshold`).
"""

from collections.abc import Mapping

from foretoken.simulator.cluster.autoscaling import PoolObservation, TargetTracker
from foretoken.simulator.serving.policy_options import PolicyOptions

_TARGET = 0.8


class KvUtilizationAutoscaler:
    """Options: those of `TargetTracker`, `target` from 0 to 1."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        read = PolicyOptions("autoscaling", options, TargetTracker.NAMES)
        read.number("target", _TARGET, high=1.0)
        self._tracker = TargetTracker(read, _TARGET)

    def decide(self, observation: PoolObservation) -> int:
        """Return the replicas over which what is in use now is the target each."""
        total = observation.kv_utilization_ratio * observation.num_running
        return self._tracker.decide(observation, total)


AUTOSCALER = KvUtilizationAutoscaler
