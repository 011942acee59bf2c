"""Profiles as Indexed Jobs on a Kubernetes cluster: submit, follow, collect, cancel."""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import (
    CancelledJobError,
    ForetokenError,
    InterruptedJobError,
    InvalidRequestError,
    ServiceUnavailableError,
)
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
from foretoken.jobs.runner import JobProgress, JobRunner, Work
from foretoken.jobs.service import RunsJobs
from foretoken.jobs.sharing import SharedJobs
from foretoken.profiler.cluster import objects
from foretoken.profiler.cluster.api import ClusterApi, Resource
from foretoken.profiler.cluster.collecting import (
    build_report,
    count_rows,
    find_runs,
    find_silent_shards,
)
from foretoken.profiler.cluster.following import (
    JobFollower,
    StartPatience,
    describe_progress,
    progress_ratio,
)
from foretoken.profiler.cluster.spec import KubernetesSpec, PodSetup
from foretoken.profiler.cluster.submitting import (
    CPU,
    JobSubmitter,
    count_devices,
    is_collective,
    name_request,
)

_log = logging.getLogger(__name__)

# Profiles that are followed at the same time; each is a thread that mostly waits.
_NUM_FOLLOWED = 8
_COUNT_PERIOD_S = 5.0

_PROFILE = "profile"
# The list of a job that names its Job in the cluster.
_SUBMITTED = "submitted"


class ClusterProfiler(RunsJobs):
    """Times operators in pods of a cluster, which record in the catalog; a `ProfilerPort`.

    A Job belongs to the profile's name: a caller that requests it again, after a crash or from
    elsewhere, follows the Job that is there. Closing leaves Jobs running; cancelling deletes them.
    """

    def __init__(
        self,
        spec: KubernetesSpec,
        setup: PodSetup,
        catalog: CatalogPort,
        state_folder: Path,
        outline: Callable[[ProfileRequest], ProfileOutline],
        sharing: SharedJobs | None = None,
    ) -> None:
        """Collect from `catalog`; call `open` before use. `outline` makes plans.

        With `sharing` profiles are those of all controllers of the catalog.
        """
        super().__init__(
            JobRunner(state_folder / "jobs", num_workers=_NUM_FOLLOWED, sharing=sharing)
        )
        self._shares_jobs = sharing is not None
        self._spec = spec
        self._setup = setup
        self._catalog = catalog
        self._outline = outline
        self._connected: ClusterApi | None = None
        self._unwanted: set[str] = set()
        # The Job in the cluster by the job that follows it.
        self._submitted: dict[str, Resource] = {}

    def open(self) -> None:
        """Connect to the cluster and load earlier jobs.

        Raises:
            InvalidRequestError: nothing says how to reach a cluster.

        """
        self._connected = ClusterApi.connect(self._spec)
        self._jobs.open({_PROFILE: self._resume})

    def close(self) -> None:
        """Stop following; what runs in the cluster goes on."""
        self._jobs.close()
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def list_local_devices(self) -> tuple[str, ...]:
        """Return the names of the devices that the cluster's nodes offer, and `cpu`."""
        return (CPU, *count_devices(self._api.list_nodes(), self._spec))

    def outline_profile(self, request: ProfileRequest) -> ProfileOutline:
        """Return what all pods together would time, as far as this machine can tell.

        Raises:
            InvalidRequestError: this machine lacks what plans are made with.

        """
        return self._outline(name_request(request))

    def create_profile(self, request: ProfileRequest) -> Job:
        """Start or take up the profile's Job in the cluster.

        Raises:
            UnknownDeviceError: no such device.
            UnknownOperatorError: the request names an operator that does not exist.
            InvalidRequestError: collectives are mixed with other operators.
            QueueFullError: too many profiles wait already.

        """
        request = name_request(request)
        is_group = is_collective(request)
        return self._jobs.create(
            _PROFILE,
            lambda progress: self._profile(request, is_group, progress),
            request if self._shares_jobs else None,
            f"{', '.join(request.operators) or 'all operators'} on {request.device}",
        )

    def _resume(self, plain: Any) -> Work:
        request = schema.decode(ProfileRequest, plain, "profile")
        is_group = is_collective(request)
        return lambda progress: self._profile(request, is_group, progress)

    def get_profile_report(self, job_id: str) -> ProfileReport:
        """Return the result of a finished profile."""
        return self._jobs.result(job_id, ProfileReport)

    def create_graph_profile(self, request: GraphRequest) -> Job:
        """Refuse: graphs are traced where the device is.

        Raises:
            InvalidRequestError: always.

        """
        raise _not_here(f"the graph of {request.model}")

    def get_graph_report(self, job_id: str) -> GraphReport:
        """Return nothing: there are no such jobs here.

        Raises:
            UnknownJobError, InvalidRequestError: always.

        """
        raise _not_here(f"the graph of job {self.get_job(job_id).job_id}")

    def create_closure(self, request: ClosureRequest) -> Job:
        """Refuse: whole steps are timed where the device is.

        Raises:
            InvalidRequestError: always.

        """
        raise _not_here(f"steps of {request.model}")

    def get_closure_report(self, job_id: str) -> ClosureReport:
        """Return nothing: there are no such jobs here.

        Raises:
            UnknownJobError, InvalidRequestError: always.

        """
        raise _not_here(f"steps of job {self.get_job(job_id).job_id}")

    def cancel_job(self, job_id: str) -> Job:
        """Delete the Job in the cluster; what its pods have recorded stays."""
        if not self.get_job(job_id).state.is_final:
            self._unwanted.add(job_id)
            submitted = self._submitted.get(job_id)
            if submitted is not None:
                self._delete(submitted)
                return super().cancel_job(job_id)
            # Another process may follow it, which is to know why it goes, or none at the moment.
            cancelled = super().cancel_job(job_id)
            for job in self._jobs.published(job_id, _SUBMITTED):
                self._delete(job)
            return cancelled
        return super().cancel_job(job_id)

    @property
    def _api(self) -> ClusterApi:
        if self._connected is None:
            raise InvalidRequestError("the profiler is not open")
        return self._connected

    def _profile(
        self, request: ProfileRequest, is_group: bool, progress: JobProgress
    ) -> ProfileReport:
        start_s = time.monotonic()
        progress.update(0.0, "submitting")
        submitter = JobSubmitter(self._api, self._spec, self._setup)
        plan = submitter.plan(request, is_group=is_group)
        job = submitter.submit(
            plan,
            lambda message: progress.update(0.0, message),
            lambda: not self._find_silent_shards(plan),
        )
        self._submitted[progress.job_id] = job
        identity = {key: job["metadata"][key] for key in ("name", "uid")}
        progress.publish(_SUBMITTED, identity["uid"], {"metadata": identity})
        command = self._api.end_command(plan.job_name)
        progress.tell(f"the Job {plan.job_name} goes on without this command; `{command}` ends it")
        try:
            self._follow(plan, job, progress)
        except (CancelledJobError, InterruptedJobError):
            is_unwanted = self._jobs.is_unwanted(progress.job_id)
            if not is_unwanted and progress.job_id not in self._unwanted:
                raise
            # It may have been submitted after it was cancelled.
            self._delete(job)
            raise CancelledJobError(f"the Job {plan.job_name} was deleted") from None
        finally:
            del self._submitted[progress.job_id]
        self._check_recorded(plan)
        return build_report(self._catalog, request.name, request.device, time.monotonic() - start_s)

    def _find_silent_shards(self, plan: objects.JobPlan) -> tuple[int, ...]:
        return find_silent_shards(
            self._catalog, plan.request.name, plan.num_pods, is_group=plan.is_group
        )

    def _check_recorded(self, plan: objects.JobPlan) -> None:
        """Refuse a Job whose pods ended well, of which the catalog has nothing.

        Raises:
            InterruptedJobError: of some of them; the message says how they ended.

        """
        silent = self._find_silent_shards(plan)
        if silent:
            endings = JobFollower(self._api, self._spec).describe_silence(plan.job_name, silent)
            raise InterruptedJobError(
                f"the Job {plan.job_name} is complete, and of {len(silent)} of its"
                f" {plan.num_pods} pods this catalog has no run\n{endings}\nis"
                f" {self._setup.catalog}, where they record, this catalog, and"
                f" {self._spec.image} the profiler's image of this version? the same command"
                " starts them again"
            )

    def _delete(self, job: Resource) -> None:
        """Delete a Job in the cluster.

        Raises:
            ForetokenError: it cannot be, and goes on; the message has the command that ends it.

        """
        try:
            self._api.delete_job(job)
        except ForetokenError as err:
            name = job["metadata"]["name"]
            message = (
                f"the Job {name} goes on, for it could not be deleted: {err.message};"
                f" `{self._api.end_command(name)}` ends it"
            )
            _log.warning(message)
            raise type(err)(message) from err

    def _follow(self, plan: objects.JobPlan, job: Resource, progress: JobProgress) -> None:
        patience = StartPatience(self._spec.start_s_max)
        said: set[str] = set()
        follower = JobFollower(self._api, self._spec)
        message, ratio, counted_s = "", 0.0, -_COUNT_PERIOD_S
        calls = (0, 0)
        for view in follower.follow(plan.job_name):
            if view is None:
                progress.update(ratio, f"{message}; the API server does not answer, trying again")
                continue
            for failure in view.pod_failures:
                # The same with other numbers is no news.
                if (kind := re.sub(r"[\d, ]+", " ", failure)) not in said:
                    said.add(kind)
                    progress.tell(failure)
            if patience.is_over(view):
                self._delete(job)
                why = "; ".join(view.pod_failures) or "the cluster does not say why"
                raise InterruptedJobError(
                    f"nothing of the Job {plan.job_name} has run for {self._spec.start_s_max} s"
                    f" ({why}), so it was deleted; profiler.kubernetes.start_s_max is how long to"
                    " wait"
                )
            if view.ending == "Failed":
                raise InterruptedJobError(
                    f"{follower.describe_failure(plan.job_name, view)}\nwhat was measured is in the"
                    " catalog; the same command goes on from there"
                )
            now_s = time.monotonic()
            if now_s - counted_s >= _COUNT_PERIOD_S:
                calls, counted_s = self._count_calls(plan.request.name, calls), now_s
            ratio = max(ratio, progress_ratio(view, *calls))
            message = describe_progress(plan.job_name, view, *calls)
            progress.update(ratio, message)

    def _count_calls(self, name: str, previous: tuple[int, int]) -> tuple[int, int]:
        try:
            return count_rows(find_runs(self._catalog, name))
        except ServiceUnavailableError:
            # The pods try again by themselves; only the count is old.
            return previous


def _not_here(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what}: the cluster runs profiles of operators only; do this on a machine with the device"
    )
