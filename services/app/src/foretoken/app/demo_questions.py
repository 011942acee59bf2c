"""The questions of the demo: GPUs that are not here, answered from the starter's measurements."""

from dataclasses import dataclass

from foretoken.app.demo import ProgressDisplay
from foretoken.client.facade import Foretoken
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

_DEPLOYMENT = ServingSearchRequest(
    scenario=ServingScenario(
        model=find_model("llama-3.1-8b"),
        device="h200_sxm",
        workload=WorkloadSpec(prefill=LengthSpec(mean=4000), decode=LengthSpec(mean=1000)),
    ),
    space=ServingSpace(max_devices=8),
    targets=ServingTargets(
        limits=(
            LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=2000.0),
            LatencyLimit(metric="tpot_ms", percentile=0, limit_ms=30.0),
        )
    ),
    num_finalists=1,
)
_STEP = TrainingScenario(
    name="Llama 3 70B on 1,024 H100",
    model=find_model("llama-3-70b"),
    device="h100_sxm",
    layout=ParallelLayout(tp=8, pp=4, dp=32),
    sequence_length=8192,
    global_batch_size=2048,
    sequence_parallel=True,
    zero_stage=1,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoAnswers:
    """The best deployment of Llama 3.1 8B on 8 H200, a step of Llama 3 70B, one GEMM of an H200."""

    deployments: ServingSearchReport
    step: TrainingReport
    gemm: LatencyEstimate


def ask_questions(foretoken: Foretoken, show: ProgressDisplay) -> DemoAnswers:
    """Search a deployment, simulate a training step, estimate an operator."""
    with show("ask 1/3 the best deployment of Llama 3.1 8B on 8 H200") as update:
        deployments = foretoken.search_serving(_DEPLOYMENT, on_progress=update)
    with show("ask 2/3 a training step of Llama 3 70B on 1,024 H100") as update:
        step = foretoken.simulate_training(_STEP, on_progress=update)
    with show("ask 3/3 a GEMM of an H200"):
        gemm = foretoken.predict(
            "gemm", device="h200_sxm", dtype=DType.BF16, m=1024, n=14336, k=4096
        )
    return DemoAnswers(deployments=deployments, step=step, gemm=gemm)
