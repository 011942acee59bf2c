"""What a page says of a whole run."""

import json
from dataclasses import replace

from foretoken.domain import schema
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import find_model
from foretoken.domain.report import Feasibility, Percentiles
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.training_run import (
    FailureRules,
    RunSize,
    TrainingRunReport,
    TrainingRunRequest,
)
from foretoken.simulator.report.page import render_page
from foretoken.simulator.report.training_run_sections import training_run_sections

_REQUEST = TrainingRunRequest(
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
_REPORT = TrainingRunReport(
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
    request_json=json.dumps(schema.encode(_REQUEST)),
)


def _titles(report: TrainingRunReport) -> list[str]:
    return [section.title for section in training_run_sections(report)]


def test_a_page_has_the_answer_its_parts_and_what_it_rests_on() -> None:
    page = render_page("a run", training_run_sections(_REPORT))
    for text in ("46.5", "94.9%", "35,712", "devices for 50 days", "a note", "94 GB every 60 min"):
        assert text in page
    assert page.count("<svg") == 4


def test_sections_without_figures_are_left_out() -> None:
    """Nothing fails, and no other size was tried."""
    report = replace(_REPORT, num_failures=0, sizes=(), notes=())
    assert _titles(report) == ["The run", "Where the days go", "Configuration"]


def test_a_run_that_cannot_be_says_why() -> None:
    infeasible = Feasibility(is_feasible=False, reason="it fails too often")
    report = replace(_REPORT, feasibility=infeasible, days=0, num_failures=0, sizes=())
    assert _titles(report) == ["The run", "Remarks", "Configuration"]
    assert "it fails too often" in training_run_sections(report)[0].warning
