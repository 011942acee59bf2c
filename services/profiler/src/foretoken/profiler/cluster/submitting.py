"""Hand a profile to the cluster once, under its name, on nodes with its GPUs."""

import dataclasses
import hashlib
import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from foretoken.domain import schema
from foretoken.domain.errors import (
    DeviceNotPresentError,
    ForetokenError,
    InvalidRequestError,
    NotAllowedError,
)
from foretoken.domain.hardware.device import DeviceSpec, all_devices, find_device
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.overlap import is_group_call
from foretoken.profiler.cluster import objects
from foretoken.profiler.cluster.api import ClusterApi, Resource, ResourceExistsError
from foretoken.profiler.cluster.spec import KubernetesSpec, PodSetup
from foretoken.profiler.planning.coverage import name_profile

CPU = "cpu"


def product_labels(device: DeviceSpec) -> tuple[str, ...]:
    """Return the values of the product label that stand for a device.

    Source: NVIDIA's GPU feature discovery writes the driver's name with dashes for spaces. What no
    label may hold, such as the parentheses of `Intel(R) Arc(TM)`, is a dash too.
    """
    return tuple(sorted({re.sub(r"[^\w.-]+", "-", name) for name in device.vendor_names}))


def count_devices(nodes: Iterable[Resource], spec: KubernetesSpec) -> Mapping[str, int]:
    """Return how many of each device the nodes offer; GPUs without a device file do not count."""
    devices = {
        label: device.name for device in all_devices().values() for label in product_labels(device)
    }
    counts: Counter[str] = Counter()
    for node in nodes:
        name = devices.get(product_of_node(node, spec))
        if name is not None:
            counts[name] += num_gpus(node, spec)
    return {name: count for name, count in sorted(counts.items()) if count}


def product_of_node(node: Resource, spec: KubernetesSpec) -> str:
    """Return the product label of a node, empty where it has none."""
    return str((node["metadata"].get("labels") or {}).get(spec.product_label, ""))


def num_gpus(node: Resource, spec: KubernetesSpec) -> int:
    """Return how many GPUs a node offers to pods."""
    offered = (node.get("status") or {}).get("allocatable") or {}
    return int(offered.get(spec.gpu_resource, 0))


# A pod's host name is the Job's name and its index, and may have 63 characters.
_LONGEST_SLUG = 36
_HASH_LENGTH = 8


def name_request(request: ProfileRequest) -> ProfileRequest:
    """Return the request with its device's own name, and a name of its own.

    Raises:
        UnknownDeviceError: no such device.

    """
    request = dataclasses.replace(request, device=find_device(request.device).name)
    return dataclasses.replace(request, name=name_profile(request))


def name_of_job(profile: str) -> str:
    """Return the name of a profile's Job, the same for the same profile."""
    slug = re.sub(r"[^a-z0-9]+", "-", profile.lower())[:_LONGEST_SLUG].strip("-")
    return "-".join(filter(None, ("foretoken", slug, _hash(profile)[:_HASH_LENGTH])))


def hash_content(request: ProfileRequest, num_shards: int) -> str:
    """Return a hash of what is profiled and how it is dealt."""
    return _hash([schema.encode(request), num_shards])


def is_collective(request: ProfileRequest) -> bool:
    """Return whether the request is for collectives, whose pods must be there together.

    Raises:
        UnknownOperatorError: it names an operator that does not exist.
        InvalidRequestError: it mixes them with others.

    """
    kinds = {find_operator(name).is_collective for name in request.operators}
    # What is timed concurrently with a collective runs in the same pods.
    kinds |= {is_group_call(c) for c in request.calls}
    if len(kinds) > 1:
        raise InvalidRequestError.of_field(
            "operators",
            "collectives run in pods that meet, other operators in pods of their own:"
            " profile them one after the other",
        )
    return kinds == {True}


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_DELETION_PAUSE_S = 1.0
_ATTEMPT_LENGTH = 5


class JobSubmitter:
    """Makes Jobs of requests."""

    def __init__(
        self,
        api: ClusterApi,
        spec: KubernetesSpec,
        setup: PodSetup,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Submit to this namespace."""
        self._api = api
        self._spec = spec
        self._setup = setup
        self._sleep = sleep

    def plan(self, request: ProfileRequest, *, is_group: bool) -> objects.JobPlan:
        """Return the Job for a request, with the nodes it may run on.

        Raises:
            DeviceNotPresentError: no node has the device; the message lists what they have.
            InvalidRequestError: nobody says how many GPUs a node has.

        """
        num_pods = self._spec.num_shards
        job_name = name_of_job(request.name)
        if request.device == CPU:
            return objects.JobPlan(
                job_name=job_name, request=request, num_pods=num_pods, is_group=is_group
            )
        if self._spec.claim_template:
            return self._claim(request, is_group=is_group)
        labels = product_labels(find_device(request.device))
        products = (self._spec.product,) if self._spec.product else labels
        try:
            nodes = self._api.list_nodes()
        except NotAllowedError:
            # Seeing nodes is a right of the whole cluster; the scheduler will tell, too.
            chosen = None
        else:
            chosen = [n for n in nodes if product_of_node(n, self._spec) in products]
            if not chosen:
                raise self._absent(request.device, nodes)
        num_here = 1
        if is_group:
            num_here = self._spec.collectives.gpus_per_node or max(
                (num_gpus(node, self._spec) for node in chosen or ()), default=0
            )
            if not num_here:
                raise InvalidRequestError.of_field(
                    "profiler.kubernetes.collectives.gpus_per_node",
                    "say how many GPUs a node has: this process may not look",
                )
        return objects.JobPlan(
            job_name=job_name,
            request=request,
            num_pods=num_pods,
            products=products,
            gpus_per_pod=num_here,
            is_group=is_group,
        )

    def _claim(self, request: ProfileRequest, *, is_group: bool) -> objects.JobPlan:
        """Return the Job whose pods get devices by a claim; which nodes have them it says.

        Raises:
            InvalidRequestError: nobody says how many GPUs a node has.

        """
        num_here = self._spec.collectives.gpus_per_node if is_group else 1
        if not num_here:
            raise InvalidRequestError.of_field(
                "profiler.kubernetes.collectives.gpus_per_node",
                "say how many GPUs a claim of the template has",
            )
        return objects.JobPlan(
            job_name=name_of_job(request.name),
            request=request,
            num_pods=self._spec.num_shards,
            gpus_per_pod=num_here,
            is_group=is_group,
        )

    def _absent(self, device: str, nodes: list[Resource]) -> DeviceNotPresentError:
        here = count_devices(nodes, self._spec)
        names = ", ".join(f"{count} {name}" for name, count in here.items()) or "no GPU of ours"
        labels = sorted({product_of_node(node, self._spec) for node in nodes} - {""})
        return DeviceNotPresentError(
            f"no node has {device}; the cluster has {names} (labels {self._spec.product_label}:"
            f" {', '.join(labels) or 'none'}); is one of them right? set"
            " profiler.kubernetes.product",
            device=device,
            present=names,
        )

    def submit(
        self,
        plan: objects.JobPlan,
        on_wait: Callable[[str], None],
        is_recorded: Callable[[], bool],
    ) -> Resource:
        """Return the Job: a new one with what it needs, or the one that is there.

        One that is complete is none any more unless what it did `is_recorded`.

        Raises:
            InvalidRequestError: a Job of this name profiles something else.

        """
        content = hash_content(plan.request, plan.num_pods)
        while True:
            job, _ = self._api.find_job(plan.job_name)
            if job is not None and self._is_replaced(job, content, is_recorded):
                self._api.delete_job(job)
                on_wait("waiting for the pods of an earlier Job to end")
                self._sleep(_DELETION_PAUSE_S)
            elif job is not None:
                self._complete(job, plan)
                return job
            else:
                with suppress(ResourceExistsError):
                    return self._create(plan, content)
                # Somebody else was faster.

    def _create(self, plan: objects.JobPlan, content: str) -> Resource:
        """Return a new Job with all that its pods read.

        Raises:
            ResourceExistsError: there is one of its name.

        """
        plan = dataclasses.replace(plan, attempt=uuid.uuid4().hex[:_ATTEMPT_LENGTH])
        # What is wrong with these is found before there is a Job.
        self._dependents(plan)
        job = self._api.create_job(objects.build_job(plan, self._spec, self._setup, content))
        try:
            self._complete(job, plan)
        except ForetokenError:
            # It has not started: where it cannot be deleted, the same command takes it up.
            with suppress(ForetokenError):
                self._api.delete_job(job)
            raise
        return job

    def _complete(self, job: Resource, plan: objects.JobPlan) -> None:
        """Make what the pods of a Job read, and let it start, unless somebody has done that."""
        marks = job["metadata"].get("annotations") or {}
        if objects.STARTED_ANNOTATION in marks or objects.ATTEMPT_ANNOTATION not in marks:
            return
        plan = dataclasses.replace(plan, attempt=marks[objects.ATTEMPT_ANNOTATION])
        for dependent in self._dependents(plan):
            with suppress(ResourceExistsError):
                self._api.create(objects.owned_by(dependent, job))
        self._api.change_job(job, objects.start_job(self._spec))

    def _dependents(self, plan: objects.JobPlan) -> list[Resource]:
        found = [objects.build_config_map(plan, self._spec, self._setup)]
        if self._setup.credentials and not self._spec.catalog_secret:
            found.append(objects.build_secret(plan, self._setup))
        if plan.is_group:
            found.append(objects.build_service(plan, self._spec))
        return found

    def _is_replaced(self, job: Resource, content: str, is_recorded: Callable[[], bool]) -> bool:
        """Return whether a Job of this name must go before ours may come."""
        metadata = job["metadata"]
        if metadata.get("deletionTimestamp"):
            return True
        conditions = (job.get("status") or {}).get("conditions") or ()
        endings = {c["type"] for c in conditions if c["status"] == "True"}
        is_same = (metadata.get("annotations") or {}).get(objects.CONTENT_ANNOTATION) == content
        if "Failed" in endings or ("Complete" in endings and not (is_same and is_recorded())):
            return True
        if not is_same:
            raise InvalidRequestError.of_field(
                "name",
                f"the Job {metadata['name']} profiles something else under this name; wait for it,"
                " cancel it, or choose another name",
            )
        return False
