"""Write the files that start a training run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.framework import choose_framework
from foretoken.simulator.launch.generated_file import (
    dump_manifests,
    render_scenario,
    write_files,
)
from foretoken.simulator.launch.trainer import (
    SCRIPT,
    TrainingFramework,
    TrainingJob,
    TrainingLaunch,
    plan_job,
)
from foretoken.simulator.launch.training_manifests import NAME, training_manifests
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario
from foretoken.simulator.training.schedule import find_schedule, with_chunks

# Fields that no strategy changes.
_OF_ALL_LAYOUTS = ("model", "dtype")


def write_training_launch(
    scenario: TrainingScenario, folder: Path, framework: str = ""
) -> tuple[Path, ...]:
    """Write a script, the framework's files, a Kubernetes job and a README; return their paths.

    `framework` is one of `trainers/` (empty: the one that the scenario's trainer describes).

    Raises:
        InvalidRequestError: the scenario cannot run, or the framework cannot do what it says;
            every reason names its field. Or the folder cannot be written.
        UnknownPluginError: there is no such framework.

    """
    trainer = choose_framework(scenario, framework)
    check_launched(scenario)
    job = plan_job(scenario)
    launch = trainer.launch(job)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["job.yaml"],
    }
    return write_files(
        folder,
        {
            **launch.files,
            "job.yaml": dump_manifests(training_manifests(job, launch)),
            "kustomization.yaml": yaml.safe_dump(kustomization, sort_keys=False),
            "scenario.yaml": render_scenario(scenario),
            "README.md": _describe(job, launch, trainer),
        },
    )


def check_launched(scenario: TrainingScenario) -> None:
    """Check that a scenario can run at all, whatever starts it.

    Raises:
        InvalidRequestError: with the reasons.

    """
    schedule = find_schedule(scenario.pipeline_schedule)
    check_scenario(scenario)
    check_chunks(chunk_ranks(with_chunks(scenario, schedule)), scenario)


def check_framework_has(scenario: TrainingScenario, framework: str = "") -> None:
    """Check that a framework has the model of a scenario and its number format, in some layout.

    `framework` is as in `write_training_launch`.

    Raises:
        InvalidRequestError: it has not, with the reasons.
        UnknownPluginError: there is no such framework.

    """
    trainer = choose_framework(scenario, framework)
    alone = replace(scenario, layout=ParallelLayout(), stage_layers=(), stage_devices=())
    try:
        trainer.launch(plan_job(alone))
    except InvalidRequestError as err:
        found = [item for item in err.violations if item.field.split(".")[0] in _OF_ALL_LAYOUTS]
        if found:
            raise InvalidRequestError.of_violations(found) from None


def check_fills_nodes(scenario: TrainingScenario, num_devices: Sequence[int]) -> None:
    """Check that one of some numbers of devices fills whole nodes, which files are written for.

    Raises:
        InvalidRequestError: none does.

    """
    problem: InvalidRequestError | None = None
    for count in num_devices:
        try:
            plan_job(replace(scenario, layout=ParallelLayout(dp=count)))
        except InvalidRequestError as err:
            problem = problem or err
        else:
            return
    if problem is not None:
        raise problem


def _describe(job: TrainingJob, launch: TrainingLaunch, trainer: TrainingFramework) -> str:
    scenario = job.scenario
    layout = scenario.layout
    nodes = f"{job.num_nodes} node{'s' * (job.num_nodes > 1)}"
    lines = [
        f"# {scenario.name}",
        "",
        (
            f"{scenario.model.name} on {layout.num_devices} {scenario.device}"
            f" ({nodes} of {job.devices_per_node}) with {trainer.name}, as `scenario.yaml` says."
        ),
        "",
        f"- `{SCRIPT}`: what starts a node's part of the run",
        *(f"- `{name}`: what it reads" for name in launch.files if name != SCRIPT),
        "- `job.yaml`, `kustomization.yaml`: the same for Kubernetes, one pod a node",
        "- `scenario.yaml`: what was simulated: `foretoken simulate training scenario.yaml`",
        "",
        *_by_hand(job),
        "",
        "On Kubernetes:",
        "",
        "```bash",
        "kubectl apply -k .",
        f"kubectl logs --follow --selector job-name={NAME} --prefix",
        "kubectl delete -k .",
        "```",
        "",
        "Before you start it:",
        "",
        *(f"- {remark}" for remark in dict.fromkeys(_remarks(job, launch, trainer))),
        "",
    ]
    return "\n".join(lines)


def _by_hand(job: TrainingJob) -> Sequence[str]:
    if job.num_nodes == 1:
        return ["By hand:", "", "```bash", f"bash {SCRIPT}", "```"]
    return [
        f"By hand, on each of {job.num_nodes} nodes, `NODE_RANK` from 0 to {job.num_nodes - 1}:",
        "",
        "```bash",
        f"MASTER_ADDR=first-node NODE_RANK=0 bash {SCRIPT}",
        "```",
    ]


def _remarks(job: TrainingJob, launch: TrainingLaunch, trainer: TrainingFramework) -> Sequence[str]:
    scenario = job.scenario
    remarks = list(launch.remarks)
    profile = scenario.trainer.profile
    if profile not in trainer.profiles[:1]:
        remarks.insert(
            0,
            f"times were simulated by the rules of {profile}; simulate with `--set"
            f" trainer.profile={trainer.profiles[0]}` for those of {trainer.name}",
        )
    if job.num_nodes > 1:
        remarks.append(
            "RDMA cards are resources of your cluster (`rdma/...`): add them to the container's"
            " limits in `job.yaml`, or collectives go through the pods' network"
        )
    remarks.append(f"`job.yaml` runs the image {launch.image}: name another where yours differs")
    remarks.append(
        "checkpoints, data and logs want a volume: add a claim to `job.yaml` and the paths to"
        " the arguments"
    )
    return remarks
