"""Hand a profile to the cluster: once, however often it is requested."""

import time
from collections.abc import Callable

from foretoken.domain.errors import DeviceNotPresentError, InvalidRequestError, NotAllowedError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.profiler.cluster import objects
from foretoken.profiler.cluster.api import ClusterApi, Resource, ResourceExistsError
from foretoken.profiler.cluster.naming import hash_content, name_of_job
from foretoken.profiler.cluster.nodes import (
    CPU,
    count_devices,
    num_gpus,
    product_labels,
    product_of_node,
)
from foretoken.profiler.cluster.spec import KubernetesSpec, PodSetup

_DELETION_PAUSE_S = 1.0


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

    def submit(self, plan: objects.JobPlan, on_wait: Callable[[str], None]) -> Resource:
        """Return the Job: a new one with what it needs, or the one that is there.

        Raises:
            InvalidRequestError: a Job of this name profiles something else.

        """
        content = hash_content(plan.request, plan.num_pods)
        body = objects.build_job(plan, self._spec, self._setup, content)
        dependents = [objects.build_config_map(plan, self._spec, self._setup)]
        if self._setup.credentials and not self._spec.catalog_secret:
            dependents.append(objects.build_secret(plan, self._setup))
        if plan.is_group:
            dependents.append(objects.build_service(plan, self._spec))
        while True:
            job, _ = self._api.find_job(plan.job_name)
            if job is not None and self._is_replaced(job, content):
                self._api.delete_job(job)
                on_wait("waiting for the pods of an earlier Job to end")
                self._sleep(_DELETION_PAUSE_S)
                continue
            is_found = job is not None
            if job is None:
                # Before the Job, so that no pod waits for them.
                for dependent in dependents:
                    self._api.apply(dependent)
                try:
                    job = self._api.create_job(body)
                except ResourceExistsError:
                    # Somebody else was faster.
                    continue
            for dependent in dependents:
                # What the pods of somebody else's Job read is not changed under them.
                self._api.apply(objects.owned_by(dependent, job), keeps_content=is_found)
            return job

    def _is_replaced(self, job: Resource, content: str) -> bool:
        """Return whether a Job of this name must go before ours may come."""
        metadata = job["metadata"]
        if metadata.get("deletionTimestamp"):
            return True
        conditions = (job.get("status") or {}).get("conditions") or ()
        endings = {c["type"] for c in conditions if c["status"] == "True"}
        is_same = (metadata.get("annotations") or {}).get(objects.CONTENT_ANNOTATION) == content
        if "Failed" in endings or ("Complete" in endings and not is_same):
            return True
        if not is_same:
            raise InvalidRequestError.of_field(
                "name",
                f"the Job {metadata['name']} profiles something else under this name; wait for it,"
                " cancel it, or choose another name",
            )
        return False
