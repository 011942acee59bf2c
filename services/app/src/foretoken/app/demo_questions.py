"""The questions of the demo: GPUs that are not here, answered from the starter's measurements."""

from dataclasses import dataclass

from foretoken.app.demo import ProgressDisplay
from foretoken.client.facade import Foretoken
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType, LatencyEstimate
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.search import (
    LatencyLimit,
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.results.training_report import TrainingReport

# Runs of this model with these lengths were measured by others, and stand below the answer.
DEPLOYMENT_TITLE = "Kimi K2.5 in INT4 on up to 8 x H200, TTFT 2 s, TPOT 40 ms"
STEP_TITLE = "Llama 3 70B on 1,024 H100"
GEMM_DEVICE = "h200_sxm"
DEPLOYMENT = ServingSearchRequest(
    scenario=ServingScenario(
        model=find_model("kimi-k2.5-int4"),
        device="h200_sxm",
        workload=WorkloadSpec(prefill=LengthSpec(mean=8192), decode=LengthSpec(mean=1024)),
    ),
    space=ServingSpace(max_devices=8),
    targets=ServingTargets(
        limits=(
            LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=2000.0),
            LatencyLimit(metric="tpot_ms", percentile=0, limit_ms=40.0),
        )
    ),
    num_finalists=1,
)
_STEP = TrainingScenario(
    name=STEP_TITLE,
    model=find_model("llama-3-70b"),
    device="h100_sxm",
    layout=ParallelLayout(tp=8, pp=4, dp=32),
    sequence_length=8192,
    global_batch_size=2048,
    sequence_parallel=True,
    zero_stage=1,
    trainer=TrainerSpec(profile="megatron-core"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoAnswers:
    """The best deployment of a model on 8 GPUs, a training step on 1,024, one GEMM of a GPU."""

    deployments: ServingSearchReport
    step: TrainingReport
    gemm: LatencyEstimate


def ask_questions(foretoken: Foretoken, show: ProgressDisplay) -> DemoAnswers:
    """Search a deployment, simulate a training step, estimate an operator."""
    with show(f"ask 1/3 {DEPLOYMENT_TITLE}") as update:
        deployments = foretoken.search_serving(DEPLOYMENT, on_progress=update)
    with show(f"ask 2/3 a training step, {STEP_TITLE}") as update:
        step = foretoken.simulate_training(_STEP, on_progress=update)
    with show("ask 3/3 a GEMM"):
        gemm = foretoken.predict(
            "gemm", device=GEMM_DEVICE, dtype=DType.BF16, m=1024, n=14336, k=4096
        )
    return DemoAnswers(deployments=deployments, step=step, gemm=gemm)
