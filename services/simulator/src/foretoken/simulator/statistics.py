"""What the simulator did since it was opened: counts for operators and dashboards."""

import threading
from bisect import bisect_left
from dataclasses import dataclass

# Upper bounds of buckets in s: from a finalist of some hundred requests to a day of a cluster.
SECONDS_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Counts by bucket, the last of them above the last bound; `total` is their sum in s."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorSnapshot:
    """The counts at one moment.

    `num_evaluated` points of searches were answered in closed form; `num_simulated` runs of
    searches were simulated, and `num_kept` found in a journal instead. `simulation_s` is the time
    each took: of a search's task, or of a simulation that was asked for by itself.
    """

    num_evaluated: int
    num_simulated: int
    num_kept: int
    simulation_s: Durations
    search_task_s: Durations


class SimulatorStatistics:
    """Adds up what several threads do."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._lock = threading.Lock()
        self._num_evaluated = 0
        self._num_kept = 0
        self._simulations = _DurationCounts()
        self._tasks = _DurationCounts()

    def observe_evaluated(self, num_points: int) -> None:
        """Count points that were answered in closed form."""
        with self._lock:
            self._num_evaluated += num_points

    def observe_kept(self, num_results: int) -> None:
        """Count results that were not computed again."""
        with self._lock:
            self._num_kept += num_results

    def observe_simulation(self, elapsed_s: float) -> None:
        """Count a simulation that was asked for by itself."""
        with self._lock:
            self._simulations.add(elapsed_s)

    def observe_search_task(self, elapsed_s: float) -> None:
        """Count a task of a search, which simulates a load."""
        with self._lock:
            self._tasks.add(elapsed_s)

    def read(self) -> SimulatorSnapshot:
        """Return the counts up to now."""
        with self._lock:
            return SimulatorSnapshot(
                num_evaluated=self._num_evaluated,
                num_simulated=sum(self._tasks.counts),
                num_kept=self._num_kept,
                simulation_s=self._simulations.read(),
                search_task_s=self._tasks.read(),
            )


class _DurationCounts:
    """Counts by bucket, under the lock of their owner."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self._total_s = 0.0

    def add(self, elapsed_s: float) -> None:
        self.counts[bisect_left(SECONDS_BOUNDS, elapsed_s)] += 1
        self._total_s += elapsed_s

    def read(self) -> Durations:
        return Durations(bounds=SECONDS_BOUNDS, counts=tuple(self.counts), total=self._total_s)
