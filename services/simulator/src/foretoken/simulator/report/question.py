"""What a page says of its question and of what the answer rests on, and what to know of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import TrainingReport
from foretoken.page.block import Table
from foretoken.page.section import Section

# What a page says of the configuration before the whole scenario in words, or not at all.
_SAID_OTHERWISE = frozenset(
    ("name", "model", "framework", "layout", "trainer", "stage_devices", "stage_topologies")
)
# These of the others also where they are as a scenario has them by default.
_ALWAYS_SHOWN = {
    *("dtype", "sequence_length", "micro_batch_size", "global_batch_size"),
    *("pipeline_schedule", "recompute"),
}
_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default
    for field in fields(TrainingScenario)
    if field.name not in _SAID_OTHERWISE
}


def with_echo(sections: Sequence[Section], lines: Iterable[str]) -> list[Section]:
    """Return sections with the echoes of their answers, said once, at the top of their page."""
    if not sections:
        return []
    first, *others = sections
    parts = (line.partition(": ")[::2] for line in lines)
    return [replace(first, about=list(dict.fromkeys((*first.about, *parts)))), *others]


def refusal(what: str, *of: Feasibility) -> str:
    """Return that `this deployment cannot run`, and the first reason; nothing where all can."""
    reasons = (f"This {what}: {one.reason}." for one in of if not one.is_feasible)
    return next(reasons, "")


def sentence(text: str) -> str:
    """Return words as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def remark_sections(remarks: Sequence[str]) -> list[Section]:
    """Return a section of what to know of a result; none where there is nothing."""
    rows = [(remark,) for remark in dict.fromkeys(remarks)]
    table = Table.listed(headers=("what to know of this result",), rows=rows, text_columns=(0,))
    return [Section(title="Remarks", table=table)] if rows else []


def list_remarks(report: TrainingReport) -> Sequence[str]:
    """Return the advice where memory does not suffice, and the notes.

    What the reason against the configuration says already is left out.
    """
    advice = dict.fromkeys(stage.advice for stage in report.memory if stage.advice)
    reason = report.feasibility.reason
    return [*(text for text in advice if text not in reason), *report.notes]


def configuration_section(scenario_json: str) -> Section:
    """Return the resolved scenario, folded; an inlined trace is shortened to its length."""
    return Section(
        title="Configuration",
        intro="The resolved scenario; given to the simulator again, it yields the same result.",
        listing=_listing(json.loads(scenario_json or "{}")),
    )


def scenario_section(scenario_json: str) -> Section:
    """Return the configuration of a training step: what matters of it first, then all."""
    scenario: dict[str, Any] = json.loads(scenario_json or "{}")
    rows = []
    if "model" in scenario:
        model = scenario["model"]
        rows.append(["model", model["name"] if isinstance(model, dict) else str(model)])
    layout = scenario.get("layout", {})
    axes = [f"{axis} {degree}" for axis, degree in layout.items() if degree not in (1, False)]
    if layout:
        rows.append(["layout", ", ".join(axes) or "one device"])
    trainer = scenario.get("trainer", {})
    if trainer:
        changes = ", ".join(f"{name} {value}" for name, value in trainer.get("rules", {}).items())
        rows.append(["trainer", trainer["profile"] + (f" ({changes})" if changes else "")])
    shown = _ALWAYS_SHOWN | ({"context_parallel"} if layout.get("cp", 1) > 1 else set())
    for name, default in _DEFAULTS.items():
        value = scenario.get(name)
        if (name in shown or value != default) and value not in (None, "", []):
            rows.append([name.replace("_", " "), _word(value)])
    table = Table.listed(headers=["", "value"], rows=rows, text_columns=(1,)) if rows else None
    return replace(configuration_section(scenario_json), table=table)


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("source") or "given in the scenario")
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "yes" if value is True else str(value)


def request_sections(
    report: ServingSearchReport | TrainingSearchReport, kind: str, origin: str
) -> list[Section]:
    """Return the resolved request of a search and the scenarios of its finalists, both folded.

    `kind` is what the command is called by: `serving`; `origin` says of which estimates it is.
    """
    sections = [
        Section(
            title="Request",
            intro=f"{origin}. Saved as a file and given to `foretoken search {kind} --request"
            " FILE`, it yields the same answer wherever it runs.",
            listing=_listing(json.loads(report.request_json or "{}")),
        )
    ]
    finalists = [finalist.scenario_json for finalist in report.finalists]
    scenarios = [json.loads(scenario) for scenario in finalists if scenario]
    if scenarios:
        sections.append(
            Section(
                title="Scenarios of the finalists",
                intro="Each as it was simulated, in order of the table; one of them in a file is a"
                f" scenario for `foretoken simulate {kind}`.",
                listing=_listing(scenarios),
            )
        )
    return sections


def _listing(content: object) -> str:
    return json.dumps(_shorten(content), indent=2, ensure_ascii=False)


def _shorten(content: object) -> object:
    """Return the content with an inlined trace shortened to its length."""
    if isinstance(content, list):
        return [_shorten(item) for item in content]
    if not isinstance(content, dict):
        return content
    return {
        # A trace is its requests as they are written, or columns of them.
        key: f"{len(next(iter(value.values())) if isinstance(value, dict) else value)} requests,"
        " not shown"
        if key == "trace_requests" and value
        else _shorten(value)
        for key, value in content.items()
    }
