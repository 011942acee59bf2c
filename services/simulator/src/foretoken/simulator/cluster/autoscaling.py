"""How many replicas a pool should have: the contract of `autoscalers/`, and the rule most share."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.simulator.serving.policy_options import PolicyOptions

# Defaults of the Horizontal Pod Autoscaler: a ratio within a tenth of one changes nothing, and
# replicas go when nothing in the last five minutes asked for them.
# Source: Kubernetes 1.30 documentation, Horizontal Pod Autoscaling, "Algorithm details".
_TOLERANCE = 0.1
_SCALE_DOWN_WINDOW_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolObservation:
    """What a policy sees of a pool when it decides.

    `num_running` replicas take requests, `num_starting` will. Requests wait in the queues of
    replicas and at their router. `kv_utilization_ratio` is the mean over running replicas,
    `num_arrivals` and `mean_outstanding` (requests waiting and running, mean over time) are since
    the last decision, `interval_s` ago.
    """

    now_s: float
    interval_s: float
    num_running: int
    num_starting: int = 0
    num_waiting_requests: int = 0
    num_running_requests: int = 0
    kv_utilization_ratio: float = 0.0
    num_arrivals: int = 0
    mean_outstanding: float = 0.0

    @property
    def num_replicas(self) -> int:
        """Replicas there are or will be."""
        return self.num_running + self.num_starting


class Autoscaler(Protocol):
    """Decides how many replicas a pool should have."""

    def decide(self, observation: PoolObservation) -> int:
        """Return the replicas wanted, those that start included; bounds are the caller's.

        Observations come in the order of time.
        """


class AutoscalerFactory(Protocol):
    """What a module of `autoscalers/` offers as its `AUTOSCALER`."""

    def __call__(self, options: Mapping[str, str], seed: int) -> Autoscaler:
        """Return a policy for one pool.

        Raises:
            InvalidRequestError: an option it does not know, or a value it cannot use.

        """


def find_autoscaler(name: str) -> AutoscalerFactory:
    """Return the plug-in of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(
        name, all_autoscalers(), "autoscaling.policy", "autoscaling policy"
    )


def all_autoscalers() -> Mapping[str, AutoscalerFactory]:
    """Return every policy by name: one module each in `autoscalers/`."""
    return scan_modules("foretoken.simulator.cluster.autoscalers", "AUTOSCALER")


class TargetTracker:
    """Keeps a quantity near `target` per replica, as the Horizontal Pod Autoscaler does.

    The replicas wanted are ceil(running x mean / target). Nothing changes while mean over target is
    within `tolerance` of 1. Replicas that start count as idle when more are wanted. The highest
    number wanted in the last `scale_down_window_s` bounds how few there may be. Options: these
    three.
    Source: Kubernetes, `pkg/controller/podautoscaler/replica_calculator.go` and `horizontal.go`;
    the limits to how fast it adds and removes replicas are not here.
    """

    NAMES = ("target", "tolerance", "scale_down_window_s")

    def __init__(self, options: PolicyOptions, default_target: float) -> None:
        self._target = options.positive("target", default_target)
        self._tolerance = options.number("tolerance", _TOLERANCE)
        self._window_s = options.number("scale_down_window_s", _SCALE_DOWN_WINDOW_S)
        # (when, replicas wanted), falling numbers: what a later one exceeds never counts again.
        self._wanted: deque[tuple[float, int]] = deque()

    def decide(self, observation: PoolObservation, total: float) -> int:
        """Return the replicas wanted for a quantity that is `total` over all running ones."""
        if not self._wanted:
            # What is there at first stays for a window.
            self._note(observation.now_s, observation.num_replicas)
        self._note(observation.now_s, self._recommend(observation, total))
        first_s = observation.now_s - self._window_s
        while len(self._wanted) > 1 and self._wanted[0][0] <= first_s:
            self._wanted.popleft()
        return self._wanted[0][1]

    def _recommend(self, observation: PoolObservation, total: float) -> int:
        current = observation.num_replicas
        if observation.num_running == 0:
            return current
        wanted = total / self._target
        if wanted <= observation.num_running:
            is_close = self._is_close(wanted / observation.num_running)
            return current if is_close else math.ceil(wanted)
        # With those that start as idle, no more are needed, or perhaps some.
        is_enough = wanted <= current or self._is_close(wanted / current)
        return current if is_enough else math.ceil(wanted)

    def _is_close(self, ratio: float) -> bool:
        # A rounding error on the border of the tolerance.
        return abs(ratio - 1.0) <= self._tolerance + 1e-12

    def _note(self, now_s: float, wanted: int) -> None:
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now_s, wanted))
