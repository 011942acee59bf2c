"""The sections of a page about a training step."""

from foretoken.domain.metrics.number_text import format_number, step_unit
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.results.report import describe_shares
from foretoken.domain.results.training_report import TrainingReport
from foretoken.page.block import Value
from foretoken.page.section import Section
from foretoken.simulator.report import training_detail as detail
from foretoken.simulator.report.memory_sections import parts_section
from foretoken.simulator.report.palette import describe_interval
from foretoken.simulator.report.question import list_remarks, remark_sections, scenario_section
from foretoken.simulator.report.rank_traffic import traffic_section


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
    return [*sections, scenario_section(report.scenario_json)]


def _overview(report: TrainingReport) -> Section:
    warning = ""
    if not report.feasibility.is_feasible:
        warning = f"This configuration cannot run: {report.feasibility.reason}."
    if report.step_time_ms == 0:
        return Section(title="Training step", warning=warning)
    intro = (
        "The interval holds what operators may be off by: families of them err on their own."
        f" The busy time rests on {describe_shares(report.step_time_ratio_by_provenance)}"
        " estimates."
    )
    return Section(
        title="Training step",
        warning=warning,
        intro=intro,
        facts=_facts(report),
    )


def _facts(report: TrainingReport) -> list[Value]:
    scale, unit = step_unit(report.step_time_ms)

    def fact(name: str, time_ms: float, note: str) -> Value:
        return Value(label=METRICS[name].label, value=time_ms / scale, unit=unit, note=note)

    low, high = report.step_time_low_ms / scale, report.step_time_high_ms / scale
    facts = [fact("step_time_ms", report.step_time_ms, describe_interval(low, high, unit))]
    if report.step_time_raw_ms not in (0, report.step_time_ms):
        change = f"calibration: {report.step_time_ms / report.step_time_raw_ms - 1:+.1%}"
        facts.append(fact("step_time_raw_ms", report.step_time_raw_ms, change))
    spread = report.step_spread_ms
    if spread.p99 > spread.p50:
        half, most = (format_number(time_ms / scale) for time_ms in (spread.p50, spread.p90))
        note = f"half {half} {unit}, nine of ten {most} {unit}"
        facts.append(fact("step_spread_ms.p99", spread.p99, note))
    exposed = sum(report.exposed_ms_by_axis.values())
    whole = sum(report.communication_ms_by_axis.values())
    facts += [
        Value.of(
            "tokens_per_s",
            report,
            f"{METRICS['tokens_per_s_per_gpu'].words(report)} per GPU,"
            f" {METRICS['num_devices'].words(report)} GPUs",
        ),
        Value.of("mfu_ratio", report, f"{METRICS['hfu_ratio'].words(report)} HFU"),
        Value.of("bubble_ratio", report, "of the step, mean over stages"),
        Value.of(
            "exposed_communication_ratio",
            report,
            f"of the step; {format_number(exposed)} of {format_number(whole)} ms"
            " on the critical stage",
        ),
    ]
    return facts
