"""What a result is of, and the figure that sums it up, for lists of results."""

import json
from collections.abc import Mapping
from typing import Any

from foretoken.domain.report import ServingReport
from foretoken.domain.result import AnyReport
from foretoken.domain.search import CapacityReport, ServingSearchReport
from foretoken.domain.training_report import TrainingReport


def name_result(report: AnyReport) -> str:
    """Return the name of the scenario, its model and its devices."""
    if isinstance(report, ServingReport | TrainingReport | CapacityReport):
        scenario = _read(report.scenario_json)
        devices = f"{report.num_devices} {scenario.get('device', '')}"
    else:
        scenario = _read(report.request_json).get("scenario", {})
        devices = str(scenario.get("device", ""))
    model = scenario.get("model", {})
    name = model.get("name", "") if isinstance(model, Mapping) else str(model)
    return f"{scenario.get('name', '')}: {name} on {devices}"


def sum_up(report: AnyReport) -> str:
    """Return the figure that a reader of a list wants first."""
    if isinstance(report, CapacityReport):
        return f"{report.capacity_rps:.4g} requests/s"
    if isinstance(report, ServingSearchReport):
        return f"best of {report.num_points:,}: {report.best or 'none qualifies'}"
    if isinstance(report, TrainingReport | ServingReport):
        if not report.feasibility.is_feasible:
            return "cannot run"
        if isinstance(report, TrainingReport):
            return f"{report.step_time_ms:.4g} ms, {report.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        return f"{report.output_throughput_tps:,.0f} output tokens/s"
    best = next(iter(report.best.values()), "none fits")
    return f"best of {report.num_points:,}: {best}"


def _read(text: str) -> Mapping[str, Any]:
    content = json.loads(text) if text else {}
    return content if isinstance(content, Mapping) else {}
