"""The simulator's use cases: serving and training simulations as jobs."""

import threading
from collections import OrderedDict
from pathlib import Path

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.job import Job
from foretoken.domain.job_runner import JobRunner, RunsJobs
from foretoken.domain.ports import PredictorPort
from foretoken.domain.report import ServingReport, TrainingReport
from foretoken.domain.scenario import ServingScenario, TrainingScenario
from foretoken.simulator.config import SimulatorConfig
from foretoken.simulator.latency_surfaces import LatencySurfaces, SurfaceSpec, fetch_surfaces
from foretoken.simulator.serving.simulation import check_engine, find_scheduler, simulate_serving
from foretoken.simulator.training.step import simulate_training


class SimulatorService(RunsJobs):
    """Implements `SimulatorPort`. Call `open` before use."""

    def __init__(self, config: SimulatorConfig, predictor: PredictorPort) -> None:
        jobs = JobRunner(
            Path(config.state_folder).expanduser(),
            num_workers=config.num_workers,
            max_queued=config.max_queued_jobs,
        )
        super().__init__(jobs)
        self._predictor = predictor
        self._surfaces = SurfaceCache(predictor, config.max_cached_surfaces)

    def open(self) -> None:
        """Load earlier jobs."""
        self._jobs.open()

    def close(self) -> None:
        """Cancel what runs and wait for it."""
        self._jobs.close()

    def create_serving_simulation(self, scenario: ServingScenario) -> Job:
        """Start simulating a serving deployment.

        Raises:
            InvalidRequestError: the engine's limits cannot be used.
            UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

        """
        check_engine(scenario.engine)
        find_scheduler(scenario.engine.scheduler)
        _check_hardware(scenario)
        return self._jobs.create(
            "serving",
            lambda progress: simulate_serving(scenario, self._surfaces.get, progress),
        )

    def get_serving_report(self, job_id: str) -> ServingReport:
        """Return the result of a finished serving simulation."""
        return self._jobs.result(job_id, ServingReport)

    def create_training_simulation(self, scenario: TrainingScenario) -> Job:
        """Start simulating a training step.

        Raises:
            UnknownDeviceError, UnknownTopologyError: no such name.

        """
        _check_hardware(scenario)
        return self._jobs.create(
            "training",
            lambda progress: simulate_training(scenario, self._predictor, progress),
        )

    def get_training_report(self, job_id: str) -> TrainingReport:
        """Return the result of a finished training simulation."""
        return self._jobs.result(job_id, TrainingReport)


class SurfaceCache:
    """Latency surfaces by what they depend on and the version of the predictor's model.

    What a predictor without a model answers is asked for again each time.
    """

    def __init__(self, predictor: PredictorPort, max_surfaces: int) -> None:
        self._predictor = predictor
        self._max_surfaces = max_surfaces
        self._kept: OrderedDict[tuple[SurfaceSpec, str], LatencySurfaces] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, spec: SurfaceSpec) -> LatencySurfaces:
        """Return the surfaces, from memory or from the predictor."""
        active = [model.version for model in self._predictor.list_models() if model.is_active]
        if len(active) != 1:
            return fetch_surfaces(spec, self._predictor)
        with self._lock:
            kept = self._kept.get((spec, active[0]))
            if kept is not None:
                self._kept.move_to_end((spec, active[0]))
                return kept
        surfaces = fetch_surfaces(spec, self._predictor)
        with self._lock:
            # The version the answer carries: training may have ended since.
            self._kept[spec, surfaces.model_version] = surfaces
            while len(self._kept) > self._max_surfaces:
                self._kept.popitem(last=False)
        return surfaces


def _check_hardware(scenario: ServingScenario | TrainingScenario) -> None:
    find_device(scenario.device)
    if scenario.topology:
        find_topology(scenario.topology)
