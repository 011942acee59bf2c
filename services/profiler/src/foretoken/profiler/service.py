"""The profiler's use cases: which devices are here, and profiling them as jobs."""

import os
import time
import uuid
from pathlib import Path

import torch

from foretoken.domain.errors import UnknownTopologyError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.job import Job
from foretoken.domain.job_runner import JobProgress, JobRunner, RunsJobs
from foretoken.domain.measurement import MeasurementFilter, Run, RunKind
from foretoken.domain.ports import CatalogPort, ProfileRequest
from foretoken.domain.report import ProfileReport
from foretoken.profiler.batches import BatchWriter, RowBuilder
from foretoken.profiler.config import ProfilerConfig, TimerSpec
from foretoken.profiler.environment import FRAMEWORK, describe_environment, framework_version
from foretoken.profiler.kernel import TORCH_DTYPES, TensorFactory
from foretoken.profiler.local_device import LocalDevice, find_local_device, list_local_devices
from foretoken.profiler.plan import (
    PlanLimits,
    Point,
    ProfilePlan,
    check_operators,
    make_plan,
    point_of,
    sweep_dtypes,
)
from foretoken.profiler.self_test import check_self_test, physical_limits, run_self_test
from foretoken.profiler.session import ProfileSession, SessionSpec
from foretoken.profiler.timer import CpuStopwatch, CudaStopwatch, Stopwatch
from foretoken.wire.arrow import read_table

TOOL = "foretoken profiler"


class ProfilerService(RunsJobs):
    """Times operators on this machine's devices; implements `ProfilerPort`.

    One profile runs at a time: two would disturb each other.
    """

    def __init__(self, config: ProfilerConfig, catalog: CatalogPort) -> None:
        """Record into `catalog`; call `open` before use."""
        super().__init__(JobRunner(Path(config.state_folder) / "jobs"))
        self._config = config
        self._catalog = catalog
        self._num_threads = config.num_threads

    def open(self) -> None:
        """Load earlier jobs and choose the number of threads."""
        self._jobs.open()
        self._num_threads = self._config.num_threads or max(1, torch.get_num_threads() - 1)

    def close(self) -> None:
        """Cancel what runs and wait for it."""
        self._jobs.close()

    def list_local_devices(self) -> tuple[str, ...]:
        """Return the names of the devices present here."""
        return tuple(device.name for device in list_local_devices())

    def create_profile(self, request: ProfileRequest) -> Job:
        """Start a profiling job.

        Raises:
            DeviceNotPresentError: this machine has no such device; the message lists what it has.
            UnknownOperatorError: the request names an operator that does not exist.
            InvalidRequestError: it names one that cannot be timed here.
            QueueFullError: too many jobs wait already.

        """
        device = find_local_device(request.device)
        check_operators(request.operators, self._num_ranks(device))
        return self._jobs.create(
            "profile", lambda progress: self._profile(request, device, progress)
        )

    def get_profile_report(self, job_id: str) -> ProfileReport:
        """Return the result of a finished profiling job."""
        return self._jobs.result(job_id, ProfileReport)

    def _profile(
        self, request: ProfileRequest, device: LocalDevice, progress: JobProgress
    ) -> ProfileReport:
        start_s = time.monotonic()
        progress.update(0.0, "planning")
        # A thread of its own has torch's default number until told otherwise.
        torch.set_num_threads(self._num_threads)
        plan = self._plan(request, device)
        if not plan.calls and not plan.collectives:
            return ProfileReport(
                device=device.name, num_planned=plan.num_skipped, num_skipped=plan.num_skipped
            )
        timer = self._config.quick_timer if request.quick else self._config.timer
        stopwatch = _open_stopwatch(device)
        progress.update(0.0, "self-test")
        environment = self._describe(request, device, stopwatch, timer)
        run = Run(
            run_id=f"profile-{device.name}-{uuid.uuid4().hex[:12]}",
            kind=RunKind.PROFILE,
            tool=TOOL,
            source=environment.get("gpu", environment["cpu"]),
            environment=environment,
        )
        session = self._session(request, device, stopwatch, run)
        session.run(plan, progress)
        counts = session.counts
        num_skipped = plan.num_skipped + counts.num_left
        return ProfileReport(
            run_id=run.run_id,
            device=device.name,
            num_planned=counts.num_measured + counts.num_failed + num_skipped,
            num_measured=counts.num_measured,
            num_failed=counts.num_failed,
            num_skipped=num_skipped,
            wall_s=time.monotonic() - start_s,
        )

    def _session(
        self, request: ProfileRequest, device: LocalDevice, stopwatch: Stopwatch, run: Run
    ) -> ProfileSession:
        config = self._config
        spec = SessionSpec(
            device=device,
            device_spec=find_device(device.name),
            timer=config.quick_timer if request.quick else config.timer,
            seed=request.seed,
            num_threads=self._num_threads,
            memory_ratio_max=config.memory_ratio_max,
            time_cap_s=request.time_cap_s,
            topology=self._topology(device),
        )
        rows = RowBuilder(device.name, FRAMEWORK, framework_version())
        writer = BatchWriter(
            self._catalog, run, batch_rows=config.batch_rows, batch_s=config.batch_s
        )
        return ProfileSession(spec, stopwatch, rows, writer)

    def _plan(self, request: ProfileRequest, device: LocalDevice) -> ProfilePlan:
        limits = PlanLimits(
            num_ranks=self._num_ranks(device),
            call_s_max=self._config.call_s_max,
            repeat_ratio=self._config.repeat_ratio,
            shard_index=self._config.shard_index,
            num_shards=self._config.num_shards,
        )

        def find_covered(operator: str) -> set[Point]:
            return self._find_covered(operator, device.name)

        return make_plan(request, find_device(device.name), find_covered, limits)

    def _find_covered(self, operator: str, device: str) -> set[Point]:
        """Return the points that this version of the framework was timed at on this device."""
        selection = MeasurementFilter(operator=operator, device=device, framework=FRAMEWORK)
        table = read_table(self._catalog.read_measurements(selection))
        names = ("phase", "dtype", "dims", "framework_version")
        rows = zip(*(table.column(name).to_pylist() for name in names), strict=True)
        version = framework_version()
        return {
            point_of(operator, phase, dtype, dict(dims))
            for phase, dtype, dims, row_version in rows
            if row_version == version
        }

    def _describe(
        self, request: ProfileRequest, device: LocalDevice, stopwatch: Stopwatch, timer: TimerSpec
    ) -> dict[str, str]:
        dtype = sweep_dtypes(device.name, request.quick)[0]
        tensors = TensorFactory(device.torch_device, TORCH_DTYPES[dtype], request.seed)
        result = run_self_test(device, tensors, stopwatch, timer)
        limits = physical_limits(find_device(device.name), dtype, self._num_threads)
        check_self_test(result, limits)
        return {
            **describe_environment(device),
            "self_test_copy_bytes_per_s": f"{result.copy_bytes_per_s:.4g}",
            "self_test_gemm_flops_per_s": f"{result.gemm_flops_per_s:.4g}",
            "self_test_dtype": dtype.name.lower(),
            "seed": str(request.seed),
        }

    def _topology(self, device: LocalDevice) -> str:
        if self._config.topology:
            return self._config.topology
        try:
            return topology_of_device(device.name).name
        except UnknownTopologyError:
            return ""

    def _num_ranks(self, device: LocalDevice) -> int:
        """Return how many ranks a collective may have here; 1 where the links have no name."""
        if not self._topology(device):
            return 1
        # Two processes of one machine stand for two CPU devices.
        return device.num_present if device.is_cuda else min(2, os.cpu_count() or 1)


def _open_stopwatch(device: LocalDevice) -> Stopwatch:
    if not device.is_cuda:
        return CpuStopwatch()
    stopwatch = CudaStopwatch(
        device.torch_device, flush_bytes=int(2 * find_device(device.name).l2_cache_bytes)
    )
    stopwatch.open()
    return stopwatch
