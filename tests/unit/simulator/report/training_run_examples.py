"""A planned training run to look at."""

import json

from foretoken.domain import schema
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import (
    FailureRules,
    RunSize,
    TrainingRunReport,
    TrainingRunRequest,
)
from foretoken.domain.results.report import Percentiles

RUN_REQUEST = TrainingRunRequest(
    scenario=TrainingScenario(
        model=find_model("llama-2-7b"),
        device="a100_sxm_80",
        layout=ParallelLayout(dp=16),
        global_batch_size=64,
    ),
    num_tokens=1e12,
    target_days=50,
    failures=FailureRules(device_mtbf_hours=1000, checkpoint_s=30),
)
RUN_REPORT = TrainingRunReport(
    num_tokens=1e12,
    num_steps=3_814_698,
    num_devices=16,
    step_time_ms=1000,
    ideal_days=44.15,
    days=46.5,
    days_low=40,
    days_high=60,
    days_spread=Percentiles(p50=46.5, p90=46.9, p99=47.2),
    goodput_ratio=0.949,
    checkpoint_ratio=0.01,
    repeated_ratio=0.02,
    restart_ratio=0.021,
    num_failures=18,
    checkpoint_interval_s=3600,
    checkpoint_s=30,
    checkpoint_bytes=94e9,
    device_hours=17_856,
    usd=35_712,
    usd_per_step=0.0094,
    usd_per_hour=2,
    price_source="given",
    energy_kwh=7142,
    target_devices=16,
    sizes=(
        RunSize(num_devices=8, dp=8, step_time_ms=2000, goodput_ratio=0, days=0, usd=0, reason="?"),
        RunSize(num_devices=16, dp=16, step_time_ms=1000, goodput_ratio=0.949, days=46.5, usd=35e3),
    ),
    notes=("a note",),
    request_json=json.dumps(schema.encode(RUN_REQUEST)),
)
