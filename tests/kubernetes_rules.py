"""What an API server refuses although the schemas let it pass."""

import re
from typing import Any

Resource = dict[str, Any]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_MAX_ANNOTATION_BYTES = 256 * 1024
_MAX_DATA_BYTES = 1024 * 1024
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def check_rules(body: Resource) -> None:
    """Refuse what the schemas let pass and an API server does not.

    Raises:
        ValueError: a rule is broken.

    """
    metadata = body["metadata"]
    expect(_NAME.fullmatch(metadata["name"]), f"no name: {metadata['name']}")
    for key, value in metadata.get("labels", {}).items():
        expect(_LABEL.fullmatch(value), f"no value of a label: {key}={value}")
    annotations = metadata.get("annotations", {})
    for key in (*metadata.get("labels", {}), *annotations):
        expect(_KEY.fullmatch(key), f"no key of a label or an annotation: {key}")
    num_bytes = sum(len(f"{key}{value}".encode()) for key, value in annotations.items())
    expect(num_bytes <= _MAX_ANNOTATION_BYTES, "annotations are too long")
    for owner in metadata.get("ownerReferences", ()):
        expect(owner["uid"] and owner["name"], "an owner has a name and a uid")
    if body["kind"] in ("ConfigMap", "Secret"):
        num_bytes = sum(len(str(value).encode()) for value in body.get("data", {}).values())
        expect(num_bytes <= _MAX_DATA_BYTES, "data are too large")
    if body["kind"] == "Service":
        expect(_SERVICE_NAME.fullmatch(metadata["name"]), f"no service: {metadata['name']}")
    if body["kind"] == "Job":
        _check_job(metadata["name"], body["spec"])


def _check_job(name: str, job: Resource) -> None:
    pod = job["template"]["spec"]
    expect(pod.get("restartPolicy") in ("Never", "OnFailure"), "restartPolicy of a Job's pods")
    expect(_DNS_LABEL.fullmatch(pod.get("subdomain", "none")), "no subdomain")
    for toleration in pod.get("tolerations", ()):
        is_any = toleration.get("operator", "Equal") == "Exists"
        expect(not (is_any and toleration.get("value")), "Exists wants no value")
    if "podFailurePolicy" in job:
        expect(pod["restartPolicy"] == "Never", "podFailurePolicy wants restartPolicy Never")
    if "maxFailedIndexes" in job:
        expect("backoffLimitPerIndex" in job, "maxFailedIndexes wants backoffLimitPerIndex")
        expect(job["maxFailedIndexes"] <= job["completions"], "maxFailedIndexes > completions")
    if "backoffLimitPerIndex" in job:
        expect(job["completionMode"] == "Indexed", "backoffLimitPerIndex wants Indexed")
    last = f"{name}-{job['completions'] - 1}"
    expect(_DNS_LABEL.fullmatch(last), f"no host name: {last}")
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in pod["containers"]:
        mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
        expect(mounts <= volumes, f"mounts without volumes: {mounts - volumes}")
        resources = container.get("resources", {})
        for kind, limit in resources.get("limits", {}).items():
            is_extended = "/" in kind
            request = resources.get("requests", {}).get(kind, limit)
            expect(not is_extended or request == limit, f"{kind}: the request is not the limit")


def expect(is_kept: object, rule: str) -> None:
    if not is_kept:
        raise ValueError(rule)
