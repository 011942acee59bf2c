"""Configuration of the simulator."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorConfig:
    """Where jobs keep their results, how many run at once.

    `max_cached_surfaces` latency surfaces stay in memory, each a few MB. With `compiles_at_start`
    the engines are compiled when the service opens, beside everything else, and not when the first
    large simulation asks for them: right for a service that stays, a waste for one command.
    """

    state_folder: str
    num_workers: int = 1
    max_queued_jobs: int = 64
    max_cached_surfaces: int = 8
    compiles_at_start: bool = False
