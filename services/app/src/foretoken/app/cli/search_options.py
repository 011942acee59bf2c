"""What to search for, as the options of `foretoken search serving` say it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.app.cli.call_words import parse_values
from foretoken.app.cli.duration import parse_ms
from foretoken.app.cli.latency_limit import LIMIT_HELP, parse_limits
from foretoken.app.cli.state import parse_assignments, scenario_changes
from foretoken.app.scenario_file import (
    build_serving_scenario,
    read_search_request,
    read_searched_scenario,
)
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.scenario import ServingScenario
from foretoken.domain.search import (
    COUNTED_GPUS,
    OBJECTIVES,
    SERVING_MODES,
    LatencyLimit,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)

# Stands for the format a model comes in.
_UNQUANTIZED = "none"
_LIST_HELP = "several with commas"
# The parts of the command's help.
_ASKED, _SPACE = "What is served", "What may vary"
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
class SpaceOptions:
    """What may vary."""

    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            "--device",
            help=f"Devices to compare, {_LIST_HELP}: see `foretoken list devices`.",
            rich_help_panel=_SPACE,
        ),
    ] = ""
    gpus: Annotated[
        int,
        typer.Option(
            min=1, help="GPUs you have: the most of a deployment.", rich_help_panel=_SPACE
        ),
    ] = 8
    price: Annotated[
        list[str] | None,
        typer.Option(
            help="USD an hour of a device: `h200_sxm=3.5`. Repeatable.", rich_help_panel=_SPACE
        ),
    ] = None
    mode: Annotated[
        str,
        typer.Option(
            help="`aggregated`, `disaggregated` (prompts and answers on replicas of their own) or"
            " `both`.",
            rich_help_panel=_SPACE,
        ),
    ] = "both"
    tp: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel degrees: `1,2,4,8`. Default: every sensible one.",
            rich_help_panel=_SPACE,
        ),
    ] = ""
    pp: Annotated[
        str, typer.Option(help="Pipeline stages: `1,2`. Default: 1.", rich_help_panel=_SPACE)
    ] = ""
    ep: Annotated[
        str,
        typer.Option(help="Expert-parallel degrees: `1,8`. Default: 1.", rich_help_panel=_SPACE),
    ] = ""
    batch: Annotated[
        str,
        typer.Option(
            help="Requests that run at once on a replica: `32,64,128`, `1:512` doubling.",
            rich_help_panel=_SPACE,
        ),
    ] = ""
    chunk: Annotated[
        str,
        typer.Option(
            help="Tokens that a step computes at most: `2048,8192`.", rich_help_panel=_SPACE
        ),
    ] = ""
    profile: Annotated[
        str,
        typer.Option(
            help=f"Engines, {_LIST_HELP}: `vllm-0.18`; see `foretoken list engines`.",
            rich_help_panel=_SPACE,
        ),
    ] = ""
    quantization: Annotated[
        str,
        typer.Option(
            help=f"Formats of the weights, {_LIST_HELP}; `none` is the model's own: `none,fp8`.",
            rich_help_panel=_SPACE,
        ),
    ] = ""
    router: Annotated[
        str,
        typer.Option(help=f"Routers before the replicas, {_LIST_HELP}.", rich_help_panel=_SPACE),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What a deployment has to meet, and what makes one better."""

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
    limit: Annotated[list[str] | None, typer.Option(help=LIMIT_HELP, rich_help_panel=_TARGETS)] = (
        None
    )
    attainment: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of requests that meet the scenario's SLO (0-1).",
            rich_help_panel=_TARGETS,
        ),
    ] = 0.0
    objective: Annotated[
        str,
        typer.Option(
            help=f"What ranks: {', '.join(f'`{name}`' for name in OBJECTIVES)}.",
            rich_help_panel=_TARGETS,
        ),
    ] = OBJECTIVES[0]
    count_gpus: Annotated[
        str,
        typer.Option(
            "--count-gpus",
            help="GPUs that throughput and cost are per: `owned` (all of --gpus, idle ones too) or"
            " `used`. With --target-rps always those used.",
            rich_help_panel=_TARGETS,
        ),
    ] = COUNTED_GPUS[0]
    target_rps: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Size every deployment to carry this many requests/s (0: --gpus).",
            rich_help_panel=_TARGETS,
        ),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class EffortOptions:
    """How much is computed."""

    finalists: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many of the best to simulate request by request.",
            rich_help_panel=_EFFORT,
        ),
    ] = 5
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also tell what links 2x, memory bandwidth or capacity +50 %, arithmetic 2x and"
            " other lengths change.",
            rich_help_panel=_EFFORT,
        ),
    ] = False
    job: Annotated[
        str,
        typer.Option(
            help="Go on watching a search that was started before, instead of a new one.",
            rich_help_panel=_EFFORT,
        ),
    ] = ""


def build_request(
    scenario: Path | None,
    question: QuestionOptions,
    space: SpaceOptions,
    targets: TargetOptions,
    effort: EffortOptions,
) -> ServingSearchRequest:
    """Return what the options ask for.

    Raises:
        InvalidRequestError: no model, no device, or a value that cannot be.

    """
    if question.request is not None:
        return read_search_request(question.request, ServingSearchRequest, build_serving_scenario)
    resolved = _resolve(scenario, question, space)
    return ServingSearchRequest(
        scenario=resolved,
        space=_build_space(space),
        targets=ServingTargets(limits=_limits(targets), slo_attainment_ratio=targets.attainment),
        objective=targets.objective,
        counted_gpus=targets.count_gpus,
        target_rps=targets.target_rps,
        num_finalists=effort.finalists,
        has_sensitivity=effort.sensitivity,
    )


def _resolve(
    scenario: Path | None, question: QuestionOptions, space: SpaceOptions
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


def _overrides(question: QuestionOptions, space: SpaceOptions) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if question.model:
        overrides["model"] = question.model
    if devices := device_names(space.devices):
        overrides["device"] = devices[0]
    for name, length in (("prefill", question.isl), ("decode", question.osl)):
        if length:
            overrides[f"workload.{name}"] = {"kind": "fixed", "mean": length}
    if len(profiles := split_list(space.profile)) == 1:
        overrides["engine.profile"] = profiles[0]
    return overrides | scenario_changes(question.change)


def _build_space(space: SpaceOptions) -> ServingSpace:
    if space.mode not in ("both", *SERVING_MODES):
        raise InvalidRequestError.of_field(
            "--mode", f"{space.mode!r} is none of {', '.join(SERVING_MODES)}, both"
        )
    devices, prices = device_names(space.devices), parse_prices(space.price or [])
    check_prices(prices, devices)
    return ServingSpace(
        devices=devices,
        usd_per_hour=prices,
        max_devices=space.gpus,
        modes=() if space.mode == "both" else (space.mode,),
        tp=_counts("--tp", space.tp),
        pp=_counts("--pp", space.pp),
        ep=_counts("--ep", space.ep),
        max_num_seqs=_counts("--batch", space.batch),
        max_num_batched_tokens=_counts("--chunk", space.chunk),
        profiles=split_list(space.profile),
        quantizations=tuple(
            "" if word == _UNQUANTIZED else word for word in split_list(space.quantization)
        ),
        routers=split_list(space.router),
    )


def _limits(targets: TargetOptions) -> tuple[LatencyLimit, ...]:
    means = [
        LatencyLimit(metric=f"{name}_ms", percentile=0, limit_ms=parse_ms(text, f"--{name}"))
        for name, text in (("ttft", targets.ttft), ("tpot", targets.tpot))
        if text
    ]
    return (*means, *parse_limits(targets.limit or []))


def check_prices(prices: Mapping[str, float], devices: Sequence[str]) -> None:
    """Refuse prices of devices that are not among those searched, where these are named.

    Raises:
        InvalidRequestError: there are such.

    """
    searched = [canonical_device(name) for name in devices]
    if unknown := [name for name in prices if devices and name not in searched]:
        raise InvalidRequestError.of_field(
            "--price", f"{', '.join(unknown)} is not searched: --devices has {', '.join(searched)}"
        )


def parse_prices(words: Sequence[str]) -> dict[str, float]:
    """Return `h200_sxm=3.5` words as USD an hour by the device's own name.

    Raises:
        InvalidRequestError: a price is no number, or negative, or a device has two.

    """
    prices: dict[str, float] = {}
    for name, text in parse_assignments(words).items():
        device = canonical_device(name)
        if device in prices:
            raise InvalidRequestError.of_field("--price", f"{device} is given twice")
        try:
            prices[device] = float(text)
        except ValueError:
            prices[device] = -1.0
        if not prices[device] >= 0:
            raise InvalidRequestError.of_field(
                "--price", f"expected USD an hour as {device}=3.5, got {text!r}"
            )
    return prices


def _counts(option: str, text: str) -> tuple[int, ...]:
    return parse_values(option, text) if text else ()


def device_names(text: str) -> tuple[str, ...]:
    """Return the devices' own names for those between commas, each once."""
    return tuple(dict.fromkeys(canonical_device(name) for name in split_list(text)))


def split_list(text: str) -> tuple[str, ...]:
    """Return the words between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
