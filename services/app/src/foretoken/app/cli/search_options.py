"""What to search for, as the options of `foretoken search serving` say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.app.cli.asked_option import Answers
from foretoken.app.cli.duration import parse_ms
from foretoken.app.cli.option_text import check_prices
from foretoken.app.cli.state import scenario_changes
from foretoken.app.scenario_file import (
    build_serving_scenario,
    read_search_request,
    read_searched_scenario,
)
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import LatencyLimit, ServingSearchRequest

# Headings of options.
_ASKED = "What is served"
_TARGETS, _EFFORT = "What a deployment has to meet", "How much is computed"


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """What is to be served. Options change what the scenario file says."""

    model: Annotated[
        str,
        typer.Option(
            help="Model: a preset (`foretoken list models`) or the path of a Hugging Face"
            " `config.json`.",
            rich_help_panel=_ASKED,
        ),
    ] = ""
    isl: Annotated[
        int | None,
        typer.Option(
            "--isl",
            min=1,
            show_default=False,
            help="Prompt tokens of every request (default: the scenario's, or 512).",
            rich_help_panel=_ASKED,
        ),
    ] = None
    osl: Annotated[
        int | None,
        typer.Option(
            "--osl",
            min=1,
            show_default=False,
            help="Answer tokens of every request (default: the scenario's, or 128).",
            rich_help_panel=_ASKED,
        ),
    ] = None
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change one key of the scenario: `workload.num_requests=500`. Repeatable.",
            rich_help_panel=_ASKED,
        ),
    ] = None
    request: Annotated[
        Path | None,
        typer.Option(
            help="A whole request in a file (YAML or JSON), as a report shows it: `scenario`,"
            " `space`, `targets` and the rest. Other options of what to search for are not read.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_ASKED,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What a deployment has to meet on average."""

    ttft: Annotated[
        str,
        typer.Option(
            "--ttft",
            help="Longest mean time to first token: `2s`, `500ms`. For a percentile use --limit.",
            rich_help_panel=_TARGETS,
        ),
    ] = ""
    tpot: Annotated[
        str,
        typer.Option(
            "--tpot", help="Longest mean time per output token: `30ms`.", rich_help_panel=_TARGETS
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class EffortOptions:
    """Which search is watched."""

    job: Annotated[
        str,
        typer.Option(
            help="Go on watching a search that was started before, instead of a new one.",
            rich_help_panel=_EFFORT,
        ),
    ] = ""


def build_request(
    scenario: Path | None, question: QuestionOptions, targets: TargetOptions, answers: Answers
) -> ServingSearchRequest:
    """Return what the options ask for.

    Raises:
        InvalidRequestError: no model, no device, or a value that cannot be.

    """
    if question.request is not None:
        return read_search_request(question.request, ServingSearchRequest, build_serving_scenario)
    asked = answers.read()
    space, limits = asked.setdefault("space", {}), asked.setdefault("targets", {})
    resolved = _resolve(scenario, question, space)
    check_prices(space)
    limits["limits"] = (*_mean_limits(targets), *limits.get("limits", ()))
    return schema.decode(ServingSearchRequest, {"scenario": resolved, **asked})


def _resolve(
    scenario: Path | None, question: QuestionOptions, space: Mapping[str, Any]
) -> ServingScenario:
    """Return the scenario: the file's, changed by options, or one of options alone."""
    content = read_searched_scenario(scenario)
    overrides = _overrides(question, space)
    known = {*content, *overrides}
    for key, option in (("model", "--model"), ("device", "--device")):
        if key not in known:
            raise InvalidRequestError.of_field(option, "is needed where no scenario file names one")
    has_trace = bool(_section(content, "workload").get("trace_path"))
    if has_trace and (question.isl or question.osl):
        raise InvalidRequestError.of_field("--isl", "a trace has lengths of its own")
    return build_serving_scenario(content, overrides, scenario or Path("search.yaml"))


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a file's content; empty where there is none."""
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def _overrides(question: QuestionOptions, space: Mapping[str, Any]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if question.model:
        overrides["model"] = question.model
    if devices := space.get("devices"):
        overrides["device"] = devices[0]
    for name, length in (("prefill", question.isl), ("decode", question.osl)):
        if length:
            overrides[f"workload.{name}"] = {"kind": "fixed", "mean": length}
    if len(profiles := space.get("profiles", ())) == 1:
        overrides["engine.profile"] = profiles[0]
    return overrides | scenario_changes(question.change)


def _mean_limits(targets: TargetOptions) -> list[LatencyLimit]:
    return [
        LatencyLimit(metric=f"{name}_ms", percentile=0, limit_ms=parse_ms(text, f"--{name}"))
        for name, text in (("ttft", targets.ttft), ("tpot", targets.tpot))
        if text
    ]
