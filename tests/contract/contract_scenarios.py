"""Small scenarios that every contract test may send."""

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.domain.results.report import (
    Percentiles,
    RequestColumns,
    ServingReport,
)
from foretoken.domain.results.training_report import (
    ComponentTime,
    MemoryColumns,
    SpanColumns,
    StageMemory,
    TrafficColumns,
    TrainingReport,
)

TINY_MODEL = ModelArchitecture(
    name="tiny",
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=256,
    max_position=512,
)
SERVING = ServingScenario(
    model=TINY_MODEL,
    device="a30",
    workload=WorkloadSpec(
        arrival="trace",
        num_requests=3,
        trace_requests=tuple(
            Request(arrival_s=0.1 * index, num_prefill_tokens=16, num_decode_tokens=4)
            for index in range(3)
        ),
    ),
)
TRAINING = TrainingScenario(model=TINY_MODEL, device="a30", sequence_length=128)
SERVING_REPORT = ServingReport(
    ttft_ms=Percentiles(mean=1.5, p50=1.0, max=3.0),
    num_requests=2,
    num_devices=1,
    step_time_s_by_group={"attention": 0.25, "mlp": 0.5},
    requests=RequestColumns(
        arrival_s=(0.0, 0.5),
        queued_s=(0.0, 0.5),
        scheduled_s=(0.0, 0.75),
        first_token_s=(0.25, -1.0),
        finished_s=(1.0, -1.0),
        num_prefill_tokens=(7, 8),
        num_decode_tokens=(3, 4),
        num_preemptions=(0, 1),
        num_cached_tokens=(0, 2),
        num_loaded_tokens=(0, 0),
        engine=(0, 1),
        slo_class=("", "chat"),
        outcome=("completed", ""),
        prefill_engine=(-1, -1),
        prefilled_s=(0.25, -1.0),
        transferred_s=(-1.0, -1.0),
        num_retries=(0, 0),
    ),
)
TRAINING_REPORT = TrainingReport(
    step_time_ms=12.5,
    memory=(StageMemory(stage=0, weights_bytes=2.0**40),),
    components=(ComponentTime(name="stage_fwd", stage=0, time_ms=1.0, num_calls=2),),
    spans=SpanColumns(
        stage=(0, 0),
        chunk=(0, 0),
        micro_batch=(1, -1),
        kind=(0, 8),
        start_ms=(0.0, 1.0),
        end_ms=(1.0, 1.5),
    ),
    memory_timeline=MemoryColumns(stage=(0, 0), time_ms=(0.0, 1.0), bytes=(2.0**30, 2.0**31)),
    traffic=TrafficColumns(
        axis=("tp", "dp"), source=(0, 1), target=(1, 0), num_devices=(1, 1), bytes=(2.0**20, 8.0)
    ),
)
