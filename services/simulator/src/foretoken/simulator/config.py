"""Configuration of the simulator."""

from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError, at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorConfig:
    """Where jobs keep their results, how many run at once, and where searches compute.

    `max_cached_surfaces` latency surfaces stay in memory, each a few MB. With `compiles_at_start`
    the engines are compiled when the service opens, in the background, and not when the first
    large simulation needs them, and with `resumes_at_start` jobs that an earlier process
    left unfinished go on then, and not when they are asked for again: both right for a service that
    stays, a waste for one command.

    Up to `num_searches` serving searches, and as many training searches, run along with
    `num_workers` simulations and as many capacity searches. They share `num_search_workers`
    processes (0: one for each core), or so many cores of the Ray cluster at `ray_address` (empty:
    none), and get equal turns. A search of more than `max_search_points` deployments,
    `max_training_points` strategies or `max_finalists` simulated ones is refused. The catalog,
    where there is one, keeps the newest `max_kept_results` results (0: none).

    A caller may have `max_jobs_per_caller` jobs that have not ended (0: any number); those that
    wait are begun in turn by caller.

    With `shares_jobs` the jobs are in the catalog, which all simulators that have it share: each
    does what it has threads for, knows all jobs and results, and goes on with those of one that was
    not heard of for `job_lease_s`. `state_folder` then has copies only.
    """

    state_folder: str
    num_workers: int = 1
    max_queued_jobs: int = 64
    max_cached_surfaces: int = 8
    compiles_at_start: bool = False
    resumes_at_start: bool = False
    num_searches: int = 8
    num_search_workers: int = 0
    ray_address: str = ""
    max_search_points: int = 1_000_000
    max_training_points: int = 20_000_000
    max_finalists: int = 200
    max_kept_results: int = 1000
    max_jobs_per_caller: int = 0
    shares_jobs: bool = False
    job_lease_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        least = {
            "num_workers": 1,
            "max_queued_jobs": 1,
            "max_cached_surfaces": 1,
            "num_searches": 1,
            "num_search_workers": 0,
            "max_search_points": 1,
            "max_training_points": 1,
            "max_finalists": 0,
            "max_kept_results": 0,
            "max_jobs_per_caller": 0,
            "job_lease_s": 1,
        }
        checks = {name: at_least(self, smallest, name)[name] for name, smallest in least.items()}
        InvalidRequestError.check("simulator", checks)
