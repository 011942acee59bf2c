"""The profiler's use cases: which devices are here, and profiling them as jobs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from foretoken.domain.errors import DeviceNotPresentError, InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.job import Job
from foretoken.domain.measurements.profiling import (
    ClosureReport,
    ClosureRequest,
    GraphReport,
    GraphRequest,
    ProfileOutline,
    ProfileReport,
    ProfileRequest,
)
from foretoken.domain.ports import CatalogPort
from foretoken.jobs.runner import JobProgress, JobRunner
from foretoken.jobs.service import RunsJobs
from foretoken.profiler.config import ProfilerConfig
from foretoken.profiler.environment import describe_environment
from foretoken.profiler.local_device import LocalDevice, find_local_device, list_local_devices
from foretoken.profiler.planning.coverage import name_profile
from foretoken.profiler.planning.wanted_call import check_operators
from foretoken.profiler.profile_job import ProfileMaker
from foretoken.profiler.ranks.node import serve_node
from foretoken.profiler.ranks.rendezvous import find_rendezvous


class ProfilerService(RunsJobs):
    """Times operators on this machine's devices; implements `ProfilerPort`.

    One profile runs at a time: two would disturb each other.
    """

    def __init__(self, config: ProfilerConfig, catalog: CatalogPort) -> None:
        """Record into `catalog`; call `open` before use."""
        super().__init__(JobRunner(Path(config.state_folder) / "jobs"))
        self._config = config
        self._catalog = catalog
        self._maker = ProfileMaker(config, catalog, config.num_threads)

    def open(self) -> None:
        """Load earlier jobs, choose the number of threads, and learn which node this is.

        Raises:
            InvalidRequestError: where nodes meet is not clear.

        """
        self._jobs.open()
        num_threads = self._config.num_threads or max(1, torch.get_num_threads() - 1)
        self._config = replace(
            self._config,
            num_threads=num_threads,
            rendezvous=find_rendezvous(self._config.rendezvous, os.environ),
        )
        self._maker = ProfileMaker(self._config, self._catalog, num_threads)

    def close(self) -> None:
        """Cancel what runs and wait for it."""
        self._jobs.close()

    def list_local_devices(self) -> tuple[str, ...]:
        """Return the names of the devices present here."""
        return tuple(device.name for device in list_local_devices())

    def outline_profile(self, request: ProfileRequest) -> ProfileOutline:
        """Return what a profile would time and for how long, without timing anything.

        A device that is not here is planned for with every kernel that there is.

        Raises:
            UnknownDeviceError: there is no such device anywhere.
            UnknownOperatorError: the request names an operator that does not exist.
            InvalidRequestError: it names one that cannot be timed, or no model can be cut so.

        """
        device: LocalDevice | None = None
        with suppress(DeviceNotPresentError):
            device = find_local_device(request.device)
        if device is None:
            request = replace(request, device=find_device(request.device).name)
        return self._maker.outline(request, device)

    def create_profile(self, request: ProfileRequest) -> Job:
        """Start a profiling job.

        Raises:
            DeviceNotPresentError: this machine has no such device; the message lists what it has.
            UnknownOperatorError: the request names an operator that does not exist.
            InvalidRequestError: it names one that cannot be timed here, or its own name is none.
            QueueFullError: too many jobs wait already.

        """
        name_profile(request)
        device = find_local_device(request.device)
        site = self._maker.site(request, device)
        check_operators(request.operators, site.num_ranks * site.num_nodes)
        return self._jobs.create(
            "profile",
            lambda progress: self._profile(request, device, progress),
            title=f"{', '.join(request.operators) or 'all operators'} on {device.name}",
        )

    def get_profile_report(self, job_id: str) -> ProfileReport:
        """Return the result of a finished profiling job."""
        return self._jobs.result(job_id, ProfileReport)

    def create_graph_profile(self, request: GraphRequest) -> Job:
        """Start tracing a model and timing the nodes of its graph.

        Raises:
            DeviceNotPresentError: this machine has no such device; the message lists what it has.
            InvalidRequestError: the model cannot be built, or a package for it is missing.
            QueueFullError: too many jobs wait already.

        """
        device = find_local_device(request.device)
        with _needing_packages():
            from foretoken.profiler.graph.profiling import (
                RowKeeping,
                check_graph_request,
                profile_graph,
            )

            check_graph_request(request)

        def work(progress: JobProgress) -> GraphReport:
            rig = self._maker.open_rig(device, self._config.quick_timer)
            keeping = RowKeeping(
                catalog=self._catalog,
                environment={**describe_environment(device), **rig.describe()},
                spool_folder=self._maker.spool_folder,
                hand_over=self._maker.hand_over,
            )
            return profile_graph(request, rig, keeping, progress)

        return self._jobs.create("graph", work, title=f"{request.model} on {device.name}")

    def get_graph_report(self, job_id: str) -> GraphReport:
        """Return the result of a finished profile of a graph."""
        return self._jobs.result(job_id, GraphReport)

    def create_closure(self, request: ClosureRequest) -> Job:
        """Start timing whole steps of a model, to hold predictions to.

        Raises:
            DeviceNotPresentError: this machine has no such device; the message lists what it has.
            InvalidRequestError: the model cannot be built, or a package for it is missing.
            QueueFullError: too many jobs wait already.

        """
        device = find_local_device(request.device)
        with _needing_packages():
            from foretoken.profiler.closure.measuring import measure_closure
        return self._jobs.create(
            "closure",
            lambda progress: measure_closure(
                request,
                device,
                self._catalog,
                progress,
                num_threads=self._config.num_threads,
                hand_over=self._maker.hand_over,
            ),
            title=f"{request.model} on {device.name}",
        )

    def get_closure_report(self, job_id: str) -> ClosureReport:
        """Return the result of finished closure measurements."""
        return self._jobs.result(job_id, ClosureReport)

    def _profile(
        self, request: ProfileRequest, device: LocalDevice, progress: JobProgress
    ) -> ProfileReport:
        rendezvous = self._config.rendezvous
        if rendezvous.is_leader:
            return self._maker.run(request, device, progress)
        # Node 0 plans and records; the others lend it their ranks.
        num_ranks = self._maker.site(request, device).num_ranks
        serve_node(rendezvous, num_ranks=num_ranks, is_cuda=device.is_cuda, progress=progress)
        return ProfileReport(device=device.name, name=request.name)


@contextmanager
def _needing_packages() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as err:
        raise InvalidRequestError(
            f"this needs the package {err.name}: pip install 'foretoken[graphs]'"
        ) from err
