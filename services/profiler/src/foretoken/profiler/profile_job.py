"""One profile from request to report: plan, self-test, timing, rows in the catalog."""

import logging
import os
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from foretoken.domain.errors import ForetokenError, UnknownTopologyError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.measurements.measurement import Run, RunKind
from foretoken.domain.measurements.profiling import ProfileOutline, ProfileReport, ProfileRequest
from foretoken.domain.name import path_inside, text_to_name
from foretoken.domain.ports import CatalogPort
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.config import ProfilerConfig, TimerSpec
from foretoken.profiler.environment import (
    FRAMEWORK,
    describe_environment,
    framework_version,
    free_memory_bytes,
)
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.planning.coverage import (
    PLANNED_KEY,
    PROFILE_KEY,
    SHARD_KEY,
    SKIPPED_KEY,
    CoverageQuery,
    KnownRows,
    name_profile,
    read_coverage,
)
from foretoken.profiler.planning.durations import CaseDurations
from foretoken.profiler.planning.plan import PlanLimits, ProfilePlan, make_plan, outline_plan
from foretoken.profiler.planning.wanted_call import PlanSite, sweep_dtypes
from foretoken.profiler.ranks.group_spec import GroupSpec
from foretoken.profiler.ranks.rows import describe_links, time_collectives
from foretoken.profiler.recording.batch_sender import (
    AWAY,
    HandOver,
    send_left_run,
    wait_for_catalog,
)
from foretoken.profiler.recording.batches import RowBuilder, open_writer
from foretoken.profiler.recording.spool import Row, find_left_runs
from foretoken.profiler.report import ReportBuilder
from foretoken.profiler.session import ProfileSession, SessionSpec
from foretoken.profiler.timing.case import Rig, open_rig
from foretoken.profiler.timing.self_test import run_self_test
from foretoken.profiler.timing.sentinel import open_sentinel

_log = logging.getLogger(__name__)

TOOL = "foretoken profiler"

# A CPU's collectives run between this many processes unless more are asked for.
_USUAL_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    """Which run was recorded, and how many calls it had no time for."""

    run_id: str = ""
    num_left: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of the report has to know of it."""
        if not self.num_left:
            return ()
        return (f"{self.num_left:,} calls are left, the time was up: the same request goes on",)


class ProfileMaker:
    """Carries out profiles on the devices of this machine, and says what they would take."""

    def __init__(self, config: ProfilerConfig, catalog: CatalogPort, num_threads: int) -> None:
        """Record into `catalog`; torch computes on `num_threads` of a CPU."""
        self._config, self._catalog = config, catalog
        self._num_threads = num_threads
        self._folder = Path(config.state_folder)

    @property
    def spool_folder(self) -> Path:
        """Where rows are until the catalog has them."""
        return self._folder / "spool"

    @property
    def hand_over(self) -> HandOver:
        """How rows go to the catalog."""
        config = self._config
        return HandOver(
            batch_rows=config.batch_rows,
            batch_s=config.batch_s,
            receipt_s=config.receipt_s,
            catalog_s=config.catalog_s,
        )

    def outline(self, request: ProfileRequest, device: LocalDevice | None) -> ProfileOutline:
        """Return what a profile would time; without a device, one that is not here.

        Raises:
            ForetokenError: as `run`.

        """
        name = request.device if device is None else device.name
        plan = self._plan(request, device, self._read_coverage(request, device))
        spec = find_device(name)
        memory_bytes = spec.memory_bytes if device is None else free_memory_bytes(device)
        allowed_bytes = self._config.memory_ratio_max * memory_bytes
        durations = self._durations(request, name)
        return outline_plan(name_profile(request), name, plan, durations, allowed_bytes)

    def run(
        self, request: ProfileRequest, device: LocalDevice, progress: JobProgress
    ) -> ProfileReport:
        """Time what is missing, and record it.

        Raises:
            CancelledJobError: cancelled; what was measured is kept.
            ServiceUnavailableError: the catalog stayed away; what was measured is kept.
            ImplausibleTimingError: the self-test failed.
            InvalidRequestError: the request has what cannot be timed here.

        """
        start_s = time.monotonic()
        request = replace(request, name=name_profile(request))
        # A thread of its own has torch's default number until it is set.
        torch.set_num_threads(self._num_threads)
        progress.update(0.0, "planning")
        known = self._ask(lambda: self._catch_up(request, device), progress)
        plan = self._plan(request, device, known)
        report = ReportBuilder(known.medians_us)
        ending = _Ending()
        if plan.all_calls or self._config.rendezvous.num_nodes > 1:
            ending = self._time(request, device, plan, report, progress)
        elif not known.has_run:
            self._record_nothing(request, device, plan, progress)
        num_skipped = plan.num_skipped + ending.num_left
        return report.build(
            run_id=ending.run_id,
            device=device.name,
            name=request.name,
            num_planned=report.num_done + num_skipped,
            num_skipped=num_skipped,
            wall_s=time.monotonic() - start_s,
            notes=(*plan.notes, *_too_long_notes(plan), *report.failures, *ending.notes),
        )

    def open_rig(self, device: LocalDevice, timer: TimerSpec) -> Rig:
        """Return what times calls here; call it in the thread that will time."""
        torch.set_num_threads(self._num_threads)
        return open_rig(device, timer, self._num_threads, self._config.memory_ratio_max)

    def _time(
        self,
        request: ProfileRequest,
        device: LocalDevice,
        plan: ProfilePlan,
        report: ReportBuilder,
        progress: JobProgress,
    ) -> _Ending:
        progress.update(0.0, "self-test")
        rig = self.open_rig(device, self._timer(request))
        dtypes = sorted({call.dtype for call in plan.calls}, key=lambda dtype: dtype.value)
        tested = run_self_test(rig, dtypes or sweep_dtypes(device.name, quick=True), request.seed)
        run = self._describe(request, device, plan, {**rig.describe(), **tested.describe()})
        rows = RowBuilder(device.name, FRAMEWORK, framework_version())
        durations = self._durations(request, device.name)
        sentinel = open_sentinel(rig, request.seed, self._config.drift_check_s)
        spec = SessionSpec(
            rig=rig,
            seed=request.seed,
            time_cap_s=request.time_cap_s,
            case_s_hung=self._config.case_s_hung,
            retime_ratio=self._config.retime_ratio,
            drift=sentinel,
            time_collectives=self._collectives(request, device, rows),
        )
        with open_writer(self._catalog, run, self.spool_folder, self.hand_over) as writer:
            session = ProfileSession(spec, rows, writer, durations, report)
            try:
                session.run(plan, progress)
            finally:
                durations.save(self._durations_path(request, device.name))
                facts = {**rig.summary(), **sentinel.summary()}
                described = " ".join(f"{name}={value!r}" for name, value in facts.items())
                _log.info("run_id=%s %s", run.run_id, described)
        return _Ending(run_id=run.run_id, num_left=session.num_left)

    def _record_nothing(
        self, request: ProfileRequest, device: LocalDevice, plan: ProfilePlan, progress: JobProgress
    ) -> None:
        """Record a run without rows: whoever waits for this share sees that none were left."""
        run = self._describe(request, device, plan, {})
        with open_writer(self._catalog, run, self.spool_folder, self.hand_over) as writer:
            writer.finish(lambda message: progress.update(1.0, message))

    def _catch_up(self, request: ProfileRequest, device: LocalDevice) -> KnownRows:
        """Record what earlier processes could not, then return what the catalog has."""
        for left in find_left_runs(self.spool_folder):
            try:
                num_rows = send_left_run(self._catalog, left)
            except AWAY:
                raise
            except ForetokenError as err:
                # They are not this profile's fault, and no reason not to measure.
                _log.warning("rows of an earlier run are refused path=%s: %s", left.path, err)
            else:
                _log.info("run_id=%s rows=%d recorded late", left.run.run_id, num_rows)
        return self._read_coverage(request, device)

    def _ask(self, ask: Callable[[], KnownRows], progress: JobProgress) -> KnownRows:
        return wait_for_catalog(ask, self.hand_over, lambda message: progress.update(0.0, message))

    def _read_coverage(self, request: ProfileRequest, device: LocalDevice | None) -> KnownRows:
        query = CoverageQuery(
            device=request.device if device is None else device.name,
            framework=FRAMEWORK,
            framework_version=framework_version(),
            topology=self._topology(request.device if device is None else device.name),
            name=name_profile(request),
            shard_index=self._config.shard_index,
            num_shards=self._config.num_shards,
        )
        return read_coverage(self._catalog, query)

    def _plan(
        self, request: ProfileRequest, device: LocalDevice | None, known: KnownRows
    ) -> ProfilePlan:
        config = self._config
        limits = PlanLimits(
            # Calls that were asked for one by one are wanted, also where they take longer.
            call_s_max=(
                config.quick_call_s_max
                if request.quick and not request.calls
                else config.call_s_max
            ),
            repeat_ratio=config.repeat_ratio,
            shard_index=config.shard_index,
            num_shards=config.num_shards,
        )
        return make_plan(request, self.site(request, device), known, limits)

    def site(self, request: ProfileRequest, device: LocalDevice | None) -> PlanSite:
        """Return where a request's calls are to be timed."""
        if device is None:
            return PlanSite(
                device=find_device(request.device),
                torch_device=torch.device("cuda"),
                num_ranks=max(request.num_ranks, 1),
                is_present=False,
            )
        return PlanSite(
            device=find_device(device.name),
            torch_device=device.torch_device,
            num_ranks=self._num_ranks(request, device),
            num_nodes=self._config.rendezvous.num_nodes,
        )

    def _num_ranks(self, request: ProfileRequest, device: LocalDevice) -> int:
        """Return how many ranks a collective may have here; 1 where the links have no name."""
        if not self._topology(device.name):
            return 1
        if self._config.rendezvous.num_local_ranks:
            return self._config.rendezvous.num_local_ranks
        if device.is_cuda:
            return min(device.num_present, request.num_ranks or device.num_present)
        # Processes of one machine stand for CPU devices.
        return request.num_ranks or min(_USUAL_CPU_RANKS, os.cpu_count() or 1)

    def _collectives(
        self, request: ProfileRequest, device: LocalDevice, rows: RowBuilder
    ) -> Callable[[Sequence[OperatorCall]], Generator[Row]]:
        group = GroupSpec(
            num_ranks=self._num_ranks(request, device),
            is_cuda=device.is_cuda,
            seed=request.seed,
            timer=self._timer(request),
            rendezvous=self._config.rendezvous,
        )
        topology = self._topology(device.name)
        return lambda calls: time_collectives(calls, group, rows, topology)

    def _describe(
        self,
        request: ProfileRequest,
        device: LocalDevice,
        plan: ProfilePlan,
        tested: Mapping[str, str],
    ) -> Run:
        shard_index, num_shards = self._config.shard_index, self._config.num_shards
        environment = {
            **describe_environment(device),
            **describe_links(device),
            **tested,
            PROFILE_KEY: request.name,
            SHARD_KEY: f"{shard_index}/{num_shards}",
            PLANNED_KEY: str(len(plan.all_calls)),
            SKIPPED_KEY: str(plan.num_skipped),
            "seed": str(request.seed),
        }
        name = text_to_name(request.name)
        return Run(
            run_id=f"profile-{device.name}-{name}-{shard_index}-{uuid.uuid4().hex[:8]}",
            kind=RunKind.PROFILE,
            tool=TOOL,
            source=environment.get("gpu", environment["cpu"]),
            environment=environment,
        )

    def _timer(self, request: ProfileRequest) -> TimerSpec:
        return self._config.quick_timer if request.quick else self._config.timer

    def _durations(self, request: ProfileRequest, device: str) -> CaseDurations:
        durations = CaseDurations(find_device(device), self._timer(request))
        durations.load(self._durations_path(request, device))
        return durations

    def _durations_path(self, request: ProfileRequest, device: str) -> Path:
        kind = "quick" if request.quick else "full"
        return path_inside(self._folder / "durations", f"{device}-{kind}.json")

    def _topology(self, device: str) -> str:
        if self._config.topology:
            return self._config.topology
        try:
            return topology_of_device(device).name
        except UnknownTopologyError:
            return ""


def _too_long_notes(plan: ProfilePlan) -> tuple[str, ...]:
    if not plan.num_too_long:
        return ()
    return (f"{plan.num_too_long:,} left out: each takes too long, see profiler.call_s_max",)
