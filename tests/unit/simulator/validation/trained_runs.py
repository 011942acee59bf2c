"""A pipeline of four stages as simulated, and as measured with errors put in."""

from collections.abc import Mapping

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import Percentiles
from foretoken.domain.results.training_report import ComponentTime, TrainingReport
from foretoken.simulator.validation.training_run import (
    ALL_STAGES,
    MeasuredComponent,
    MeasuredTraining,
)

NUM_STAGES, NUM_MICRO_BATCHES, NUM_LAYERS = 4, 8, 2
SCENARIO = TrainingScenario(
    model=find_model("tiny-llama"), device="cpu", layout=ParallelLayout(pp=NUM_STAGES)
)
# Of one occurrence in ms, alike on all stages.
TIMES: Mapping[str, float] = {
    "encoder_fwd": 4.0,
    "encoder_bwd": 9.0,
    "stage_fwd": 10.0,
    "stage_bwd": 20.0,
    "mp_allreduce": 0.5,
    "pp_p2p": 0.25,
    "dp_allreduce": 30.0,
    "dp_allgather": 8.0,
    "optimizer": 12.0,
}
CALLS: Mapping[str, int] = {
    "encoder_fwd": NUM_LAYERS * NUM_MICRO_BATCHES,
    "encoder_bwd": NUM_LAYERS * NUM_MICRO_BATCHES,
    "stage_fwd": NUM_MICRO_BATCHES,
    "stage_bwd": NUM_MICRO_BATCHES,
    "mp_allreduce": 6 * NUM_LAYERS * NUM_MICRO_BATCHES,
    "pp_p2p": NUM_MICRO_BATCHES,
}


def step_ms(times: Mapping[str, float]) -> float:
    """Return the step of a 1F1B pipeline of equal stages, with what follows it."""
    passes = (NUM_MICRO_BATCHES + NUM_STAGES - 1) * (times["stage_fwd"] + times["stage_bwd"])
    sends = 2 * (NUM_STAGES - 1) * times["pp_p2p"]
    return passes + sends + times["dp_allreduce"] + times["optimizer"]


def simulate(times: Mapping[str, float] = TIMES) -> TrainingReport:
    """Return the report of a simulation with these times."""
    step = step_ms(times)
    return TrainingReport(
        step_time_ms=step,
        step_time_raw_ms=step,
        step_time_low_ms=0.9 * step,
        step_time_high_ms=1.2 * step,
        step_spread_ms=Percentiles(mean=step, p50=step, p90=1.01 * step, p99=1.02 * step),
        num_micro_batches=NUM_MICRO_BATCHES,
        step_time_ratio_by_provenance={"measured": 1.0},
        components=tuple(
            ComponentTime(name=name, stage=stage, time_ms=time_ms, num_calls=CALLS.get(name, 1))
            for name, time_ms in times.items()
            for stage in range(NUM_STAGES)
        ),
    )


def measure(
    times: Mapping[str, float] = TIMES, flags: Mapping[tuple[str, int], str] | None = None
) -> MeasuredTraining:
    """Return a run with these times, on all stages apart; flagged where `flags` says so."""
    step = step_ms(times)
    return MeasuredTraining(
        name="run",
        source="a formula",
        step=MeasuredComponent(
            name="step",
            stage=ALL_STAGES,
            time_ms=step,
            mean_ms=step,
            samples_ms=(0.99 * step, step, 1.01 * step),
        ),
        components=tuple(
            MeasuredComponent(
                name=name,
                stage=stage,
                time_ms=time_ms,
                mean_ms=time_ms,
                flags=(flags or {}).get((name, stage), ""),
            )
            for name, time_ms in times.items()
            for stage in range(NUM_STAGES)
        ),
    )
