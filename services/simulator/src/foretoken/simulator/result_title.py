"""What a result is of, and the figure that sums it up, for lists of results."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from foretoken.domain.metrics.number_text import describe_step
from foretoken.domain.requests.search import CandidateColumns, CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.requests.training_search import StrategyColumns, TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import AnyReport
from foretoken.domain.results.training_report import TrainingReport

# More sizes of clusters are given as the smallest to the largest.
_MAX_COUNTS = 3


def name_result(report: AnyReport) -> str:
    """Return the name of the scenario, its model and its devices."""
    if isinstance(report, ServingReport | TrainingReport | CapacityReport):
        scenario = _read(report.scenario_json)
        devices = f"{report.num_devices} {scenario.get('device', '')}"
    else:
        request = _read(report.request_json)
        scenario = request.get("scenario", {})
        devices = _devices(report, scenario, request.get("space", {}))
    model = scenario.get("model", {})
    name = model.get("name", "") if isinstance(model, Mapping) else str(model)
    return f"{scenario.get('name', '')}: {name} on {devices}"


def _devices(
    report: TrainingRunReport | ServingSearchReport | TrainingSearchReport,
    scenario: Mapping[str, Any],
    space: Mapping[str, Any],
) -> str:
    """Return the devices of a run, or of the clusters that a search compares."""
    device = str(scenario.get("device", ""))
    if isinstance(report, TrainingRunReport):
        return f"{report.num_devices} {device}"
    devices = " or ".join(space.get("devices") or (device,))
    if isinstance(report, ServingSearchReport):
        return f"up to {space['max_devices']} {devices}" if "max_devices" in space else devices
    if space.get("node_groups"):
        return " and ".join(map(_describe_nodes, space["node_groups"]))
    counts = space.get("num_devices") or (_count_devices(scenario.get("layout", {})),)
    return f"{_list_counts(counts)} {devices}"


def _describe_nodes(group: Mapping[str, Any]) -> str:
    size = group.get("devices_per_node") or ""
    return f"{group.get('num_nodes', 1)}x{size} {group['device']}"


def _count_devices(layout: Mapping[str, int]) -> int:
    return prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))


def _list_counts(counts: Sequence[int]) -> str:
    few = len(counts) <= _MAX_COUNTS
    return " or ".join(map(str, counts)) if few else f"{min(counts)} to {max(counts)}"


def sum_up(report: AnyReport) -> str:
    """Return the figure that a reader of a list wants first."""
    if isinstance(report, CapacityReport):
        return f"{report.capacity_rps:.4g} requests/s"
    if isinstance(report, ServingSearchReport):
        deployments = report.candidates
        throughput = deployments.output_throughput_tps_per_gpu
        best = _describe_best(deployments, throughput, "output tokens/s/GPU")
        return f"best of {report.num_points:,}: {best or report.best or 'none qualifies'}"
    if isinstance(report, TrainingSearchReport):
        strategies = report.candidates
        best = _describe_best(strategies, strategies.tokens_per_s_per_gpu, "tokens/s/GPU")
        return f"best of {report.num_points:,}: {best or 'none fits'}"
    return _sum_up_one(report) if report.feasibility.is_feasible else "cannot run"


def _describe_best(
    columns: CandidateColumns | StrategyColumns, throughput: Sequence[float], unit: str
) -> str:
    """Return the candidate of the first rank with its throughput; nothing where none has one."""
    ranked = [place for place, rank in enumerate(columns.rank) if rank > 0]
    if not ranked:
        return ""
    best = min(ranked, key=lambda place: columns.rank[place])
    return f"{columns.name[best]}, {throughput[best]:,.0f} {unit}"


def _sum_up_one(report: TrainingReport | TrainingRunReport | ServingReport) -> str:
    if isinstance(report, TrainingReport):
        step = describe_step(report.step_time_ms)
        return f"{step}, {report.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    if isinstance(report, TrainingRunReport):
        cost = f", {report.usd:,.0f} USD" if report.usd else ""
        return f"{report.num_tokens:.4g} tokens in {report.days:.4g} days{cost}"
    return f"{report.output_throughput_tps:,.0f} output tokens/s"


def _read(text: str) -> Mapping[str, Any]:
    content = json.loads(text) if text else {}
    return content if isinstance(content, Mapping) else {}
