"""The main job from end to end on this machine's CPU, over four service processes."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from foretoken.app.config import AppConfig, EndpointsConfig
from foretoken.client.facade import Foretoken
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.job import Job
from foretoken.domain.measurements.estimate import DType, LatencyEstimate
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.profiling import ProfileReport, ProfileRequest
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.results.report import PredictorTrainingReport, ServingReport
from foretoken.domain.results.training_report import TrainingReport

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0

# Which services each one calls: it is started after them.
_NEEDS: Mapping[str, Sequence[str]] = {
    "catalog": (),
    "predictor": ("catalog",),
    "simulator": ("predictor", "catalog"),
    "profiler": ("catalog",),
}
# Shown while a step runs: a context manager that takes job states.
ProgressDisplay = Callable[[str], AbstractContextManager[Callable[[Job], None]]]

# What the demo's simulations ask for; the profiler knows more than a minute's worth.
OPERATORS = (
    "adam",
    "attention_decode",
    "attention_mixed",
    "attention_prefill",
    "cross_entropy",
    "embedding",
    "gemm",
    "gradient_accumulation",
    "gradient_norm",
    "kv_cache_write",
    "residual_add",
    "rms_norm",
    "rope",
    "sampler",
    "silu_mul",
    "unscale",
)

# A busy machine gets no further than this; points come in random order, so that what is timed until
# then is a sample of all of them.
_PROFILE_S = 90.0
# Offered load as a share of the saturated throughput.
_LOAD_RATIOS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2)
# Arrives all at once for any model: the deployment is never idle.
_SATURATING_RPS = 1e6


class ServiceProcesses:
    """The four services, each a `foretoken serve` of its own, with files under `home`.

    A context manager: leaving it stops every process and waits for it.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running = ExitStack()
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Start the services in the order they need each other."""
        try:
            for name in _NEEDS:
                self._addresses[name] = self._start(name)
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop every process."""
        self._running.close()

    @property
    def client_config(self) -> AppConfig:
        """A configuration in which all four services are these processes."""
        return AppConfig(home=str(self._home), endpoints=EndpointsConfig(**self._addresses))

    def _start(self, name: str) -> str:
        command = [sys.executable, "-m", "foretoken.app", "--home", str(self._home)]
        for needed in _NEEDS[name]:
            command += ["--endpoint", f"{needed}={self._addresses[needed]}"]
        command += ["serve", name, "--port", "0", "--metrics-port", "-1"]
        log_path = self._home / f"{name}.log"
        log_file = self._running.enter_context(log_path.open("w", encoding="utf-8"))
        process = subprocess.Popen(  # noqa: S603 - our own program
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log_file, text=True
        )
        self._running.callback(_stop, process, name)
        # The service prints its address once it serves; an end of file means it died.
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("serving "):
            tail = log_path.read_text(encoding="utf-8")[-2000:]
            raise ServiceUnavailableError(f"{name} did not start:\n{tail}", service=name)
        return line.removeprefix("serving ").strip()


def _stop(process: subprocess.Popen[str], name: str) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _log.warning("killing service=%s: it did not stop in %.0f s", name, _STOP_TIMEOUT_S)
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOutcome:
    """Everything the demo found out."""

    profile: ProfileReport
    training: PredictorTrainingReport
    estimate: LatencyEstimate
    serving: Sequence[ServingReport]
    training_step: TrainingReport


def run_demo(foretoken: Foretoken, show: ProgressDisplay) -> DemoOutcome:
    """Profile the CPU, train, predict one operator, simulate serving and a training step."""
    with show("1/4 profile this CPU") as update:
        request = ProfileRequest(
            device="cpu", operators=OPERATORS, quick=True, time_cap_s=_PROFILE_S
        )
        profile = foretoken.profile(request, on_progress=update)
    with show("2/4 train latency models") as update:
        training = foretoken.train(TrainRequest(), on_progress=update)
    estimate = foretoken.predict("gemm", device="cpu", dtype=DType.FP32, m=100, n=1408, k=512)
    serving: list[ServingReport] = []
    for scenario in _rising_load(foretoken):
        with show(f"3/4 simulate {scenario.workload.rate_rps:.2g} requests/s") as update:
            serving.append(foretoken.simulate_serving(scenario, on_progress=update))
    with show("4/4 simulate a training step") as update:
        training_step = foretoken.simulate_training(_training(), on_progress=update)
    return DemoOutcome(
        profile=profile,
        training=training,
        estimate=estimate,
        serving=serving,
        training_step=training_step,
    )


def _rising_load(foretoken: Foretoken) -> Iterator[ServingScenario]:
    saturated = foretoken.simulate_serving(_at_rate(_SATURATING_RPS))
    for load_ratio in _LOAD_RATIOS:
        yield _at_rate(load_ratio * saturated.request_throughput_rps)


def _at_rate(rate_rps: float) -> ServingScenario:
    scenario = _serving()
    return replace(scenario, workload=replace(scenario.workload, rate_rps=rate_rps))


def _serving() -> ServingScenario:
    return ServingScenario(
        name="demo serving",
        model=find_model("tiny-llama"),
        device="cpu",
        dtype=DType.FP32,
        engine=EngineSpec(
            profile="plain", max_num_seqs=16, max_num_batched_tokens=256, num_kv_blocks=2048
        ),
        workload=WorkloadSpec(
            num_requests=200,
            prefill=LengthSpec(kind="uniform", minimum=16, maximum=256),
            decode=LengthSpec(kind="uniform", minimum=8, maximum=64),
        ),
        slo=Slo(ttft_ms=500.0, tpot_ms=50.0),
    )


def _training() -> TrainingScenario:
    return TrainingScenario(
        name="demo training",
        model=find_model("tiny-llama"),
        device="cpu",
        dtype=DType.FP32,
        sequence_length=128,
        micro_batch_size=2,
        global_batch_size=8,
    )
