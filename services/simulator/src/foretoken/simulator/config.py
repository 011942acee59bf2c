"""Configuration of the simulator."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorConfig:
    """Where jobs keep their results, how many run at once.

    `max_cached_surfaces` latency surfaces stay in memory, each a few MB.
    """

    state_folder: str
    num_workers: int = 1
    max_queued_jobs: int = 64
    max_cached_surfaces: int = 8
