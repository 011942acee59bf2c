"""The sections of a page about a training step."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from foretoken.domain.metrics.number_text import format_number, step_unit
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import describe_shares
from foretoken.domain.results.training_report import TrainingReport
from foretoken.page.section import DataTable, Fact, Section
from foretoken.simulator.report import training_detail as detail
from foretoken.simulator.report.provenance import describe_interval
from foretoken.simulator.report.question import (
    configuration_section,
    list_remarks,
    remark_sections,
    with_echo,
)
from foretoken.simulator.report.rank_traffic import traffic_section
from foretoken.simulator.report.stage_memory import parts_section

# What a page says of the configuration before the whole scenario, by its keys.
_CONFIGURATION = (
    *("device", "topology", "dtype", "sequence_length", "micro_batch_size", "global_batch_size"),
    *("pipeline_schedule", "virtual_stages", "stage_layers", "recompute", "recompute_layers"),
    *("recompute_modules", "partitions_activations", "zero_stage", "shard_degree"),
    *("sequence_parallel", "context_parallel", "weight_parallel", "weight_degree", "expert_tp"),
    *("moe_routing", "moe_imbalance_ratio", "overflow_ratio", "straggler_ratio"),
    *("network_spread_ratio", "power_limit_w", "module_times", "calibration"),
)
# These also where they are as a scenario has them by default.
_ALWAYS_SHOWN = {
    *("dtype", "sequence_length", "micro_batch_size", "global_batch_size"),
    *("pipeline_schedule", "recompute"),
}
_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default for field in dataclasses.fields(TrainingScenario)
}


def training_sections(report: TrainingReport) -> list[Section]:
    """Return overview, pipeline, time, memory, components and configuration of a step."""
    sections = [_overview(report), *detail.step_sections({"": report})]
    if report.memory:
        sections.append(parts_section(report.memory))
    traffic = traffic_section(report)
    if traffic is not None:
        sections.append(traffic)
    if report.components:
        sections.append(detail.components(report))
    sections += remark_sections(list_remarks(report))
    return with_echo([*sections, scenario_section(report.scenario_json)], report.echo)


def _overview(report: TrainingReport) -> Section:
    warning = ""
    if not report.feasibility.is_feasible:
        warning = f"This configuration cannot run: {report.feasibility.reason}."
    if report.step_time_ms == 0:
        return Section(title="Training step", warning=warning)
    intro = (
        "The interval is the step with every operator at its lower, and at its upper, 90 % bound."
        f" The busy time rests on {describe_shares(report.step_time_ratio_by_provenance)}"
        " estimates."
    )
    return Section(
        title="Training step",
        warning=warning,
        intro=intro,
        facts=(*_time_facts(report), *_use_facts(report)),
    )


def _time_facts(report: TrainingReport) -> list[Fact]:
    scale, unit = step_unit(report.step_time_ms)
    interval = describe_interval(
        report.step_time_low_ms / scale, report.step_time_high_ms / scale, unit
    )
    facts = [
        Fact(
            label=METRICS["step_time_ms"].label,
            value=f"{format_number(report.step_time_ms / scale)} {unit}",
            note=interval,
        )
    ]
    if is_calibrated(report):
        facts.append(
            Fact(
                label=METRICS["step_time_raw_ms"].label,
                value=f"{format_number(report.step_time_raw_ms / scale)} {unit}",
                note=f"calibration: {report.step_time_ms / report.step_time_raw_ms - 1:+.1%}",
            )
        )
    spread = report.step_spread_ms
    if spread.p99 > spread.p50:
        facts.append(
            Fact(
                label=METRICS["step_spread_ms.p99"].label,
                value=f"{format_number(spread.p99 / scale)} {unit}",
                note=f"half {format_number(spread.p50 / scale)} {unit},"
                f" nine of ten {format_number(spread.p90 / scale)} {unit}",
            )
        )
    return facts


def _use_facts(report: TrainingReport) -> list[Fact]:
    exposed = sum(report.exposed_ms_by_axis.values())
    whole = sum(report.communication_ms_by_axis.values())
    return [
        Fact.of(
            "tokens_per_s",
            report,
            f"{METRICS['tokens_per_s_per_gpu'].words(report)} per GPU,"
            f" {METRICS['num_devices'].words(report)} GPUs",
        ),
        _share_fact(report, "mfu_ratio", f"{METRICS['hfu_ratio'].words(report)} HFU"),
        _share_fact(report, "bubble_ratio", "of the step, mean over stages"),
        _share_fact(
            report,
            "exposed_communication_ratio",
            f"of the step; {format_number(exposed)} of {format_number(whole)} ms"
            " on the critical stage",
        ),
    ]


def _share_fact(report: TrainingReport, name: str, remark: str) -> Fact:
    return Fact(label=METRICS[name].label, value=METRICS[name].words(report), note=remark)


def is_calibrated(report: TrainingReport) -> bool:
    """Tell whether the step differs from the simulation without calibration."""
    return report.step_time_raw_ms > 0 and report.step_time_raw_ms != report.step_time_ms


def scenario_section(scenario_json: str) -> Section:
    """Return the configuration of a training step: what matters of it first, then all."""
    whole = configuration_section(scenario_json)
    scenario: dict[str, Any] = json.loads(scenario_json) if scenario_json else {}
    rows = []
    if "model" in scenario:
        model = scenario["model"]
        rows.append(["model", model["name"] if isinstance(model, dict) else str(model)])
    layout = scenario.get("layout", {})
    axes = [f"{axis} {degree}" for axis, degree in layout.items() if degree != 1]
    if layout:
        rows.append(["layout", ", ".join(axes) or "one device"])
    trainer = scenario.get("trainer", {})
    if trainer:
        changes = ", ".join(f"{name} {value}" for name, value in trainer.get("rules", {}).items())
        rows.append(["trainer", trainer["profile"] + (f" ({changes})" if changes else "")])
    shown = _ALWAYS_SHOWN | ({"context_parallel"} if layout.get("cp", 1) > 1 else set())
    for name in _CONFIGURATION:
        value = scenario.get(name)
        is_told = name in shown or value != _DEFAULTS.get(name)
        if is_told and value not in (None, "", []):
            rows.append([name.replace("_", " "), _word(value)])
    table = DataTable(headers=["", "value"], rows=rows, text_columns=(1,)) if rows else None
    return Section(title=whole.title, intro=whole.intro, table=table, listing=whole.listing)


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("source") or "given in the scenario")
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "yes" if value is True else str(value)
