"""Kubernetes objects of a training run: an indexed job of one pod a node, and their names."""

from collections.abc import Mapping

from foretoken.domain.hardware.device import find_device
from foretoken.simulator.launch.manifests import Manifest, label_of
from foretoken.simulator.launch.shell_script import MASTER_PORT
from foretoken.simulator.launch.trainer import SCRIPT, TrainingJob, TrainingLaunch

NAME = "training"
# Where the generated files are in the container.
_FOLDER = "/launch"
_SHARED_MEMORY = "64Gi"


def training_manifests(job: TrainingJob, launch: TrainingLaunch) -> list[Manifest]:
    """Return the files as a config map, the job that runs them, and the service that names pods.

    Pods have an index, which is their node's rank; the first one's name is where they meet. Each
    asks for the GPUs of a whole node of its device, as NVIDIA's feature discovery labels it.
    """
    return [_files(launch.files), _service(), _job(job, launch)]


def _files(files: Mapping[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{NAME}-files", "labels": label_of(NAME)},
        "data": dict(files),
    }


def _service() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "labels": label_of(NAME)},
        "spec": {
            "clusterIP": "None",
            # Pods meet before they are ready.
            "publishNotReadyAddresses": True,
            "selector": label_of(NAME),
            "ports": [{"name": "rendezvous", "port": MASTER_PORT, "targetPort": MASTER_PORT}],
        },
    }


def _job(job: TrainingJob, launch: TrainingLaunch) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME, "labels": label_of(NAME)},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.num_nodes,
            "parallelism": job.num_nodes,
            # Ranks end together: without one of them the others wait for good.
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": label_of(NAME)},
                "spec": _pod(job, launch),
            },
        },
    }


def _pod(job: TrainingJob, launch: TrainingLaunch) -> Manifest:
    scenario = job.scenario
    product = find_device(scenario.device).vendor_names[0].replace(" ", "-")
    return {
        "subdomain": NAME,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "nodeSelector": {"nvidia.com/gpu.product": product},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": label_of(NAME)},
            }
        ],
        "containers": [_container(job, launch)],
        "volumes": [
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY},
            },
            {"name": "files", "configMap": {"name": f"{NAME}-files"}},
        ],
    }


def _container(job: TrainingJob, launch: TrainingLaunch) -> Manifest:
    devices = {"nvidia.com/gpu": str(job.devices_per_node)}
    return {
        "name": NAME,
        "image": launch.image,
        "command": ["bash", f"{_FOLDER}/{SCRIPT}"],
        "env": [
            # The script reads the pod's own index from JOB_COMPLETION_INDEX.
            {"name": "MASTER_ADDR", "value": f"{NAME}-0.{NAME}"},
            # For the reader to fill in; the script says what it cannot do without.
            {"name": "DATA_PATH", "value": ""},
            {"name": "TOKENIZER", "value": ""},
            {
                "name": "HF_TOKEN",
                "valueFrom": {
                    "secretKeyRef": {"name": "hugging-face", "key": "token", "optional": True}
                },
            },
        ],
        "ports": [{"name": "rendezvous", "containerPort": MASTER_PORT}],
        "resources": {"requests": devices, "limits": devices},
        # Network cards read and write memory that must stay where it is.
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["IPC_LOCK"]},
        },
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - in the container
            {"name": "files", "mountPath": _FOLDER, "readOnly": True},
        ],
    }
