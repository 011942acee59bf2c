"""`foretoken search serving`: rank the deployments of a space."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.app.cli.option_text import check_prices, parse_ms
from foretoken.app.cli.output_file import write_columns, write_page
from foretoken.app.cli.request_options import Answers, OptionsOf, with_option_groups
from foretoken.app.cli.search_text import report_table
from foretoken.app.cli.state import (
    leave_unless,
    note,
    note_search,
    open_composition,
    scenario_changes,
    show_progress,
    state_of,
)
from foretoken.app.installed_runs import list_installed_runs, show_nearest
from foretoken.app.scenario_file import (
    build_serving_scenario,
    read_search_request,
    read_searched_scenario,
)
from foretoken.client.job_wait import wait_for_job
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.job import Job
from foretoken.domain.ports import SimulatorPort
from foretoken.domain.requests.option import option
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    Finalist,
    LatencyLimit,
    ServingSearchReport,
    ServingSearchRequest,
)
from foretoken.domain.requests.simulated_answer import read_finalist
from foretoken.domain.results.report import RequestColumns, SeriesColumns
from foretoken.simulator.launch.deployment import LaunchOptions, write_deployment
from foretoken.simulator.launch.server import find_server, find_server_of

# Headings of options.
_ASKED = "What is served"
_TARGETS, _EFFORT = "What a deployment has to meet", "How much is computed"
_RESULTS = "Where results go"


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """What is to be served. Options change what the scenario file says."""

    model: str = option(
        "",
        "Model: a preset (`foretoken list models`) or the path of a `config.json` or a GGUF file.",
        group=_ASKED,
    )
    isl: int | None = option(
        None,
        "Prompt tokens of every request (default: the scenario's, or 512).",
        minimum=1,
        group=_ASKED,
    )
    osl: int | None = option(
        None,
        "Answer tokens of every request (default: the scenario's, or 128).",
        minimum=1,
        group=_ASKED,
    )
    change: tuple[str, ...] = option(
        (),
        "Change one key of the scenario: `workload.num_requests=500`. Repeatable.",
        names=("--set",),
        syntax="words",
        group=_ASKED,
    )
    request: Path | None = option(
        None,
        "A whole request in a file (YAML or JSON), as a report shows it: `scenario`,"
        " `space`, `targets` and the rest. Other options of what to search for are not read.",
        syntax="file",
        group=_ASKED,
    )


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What a deployment has to meet on average."""

    ttft: str = option(
        "",
        "Longest mean time to first token: `2s`, `500ms`. For a percentile use --limit.",
        group=_TARGETS,
    )
    tpot: str = option("", "Longest mean time per output token: `30ms`.", group=_TARGETS)


@dataclass(frozen=True, kw_only=True)
class EffortOptions:
    """Which search is watched."""

    job: str = option(
        "", "Go on watching a search that was started before, instead of a new one.", group=_EFFORT
    )


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
    for key, name in (("model", "--model"), ("device", "--device")):
        if key not in known:
            raise InvalidRequestError.of_field(name, "is needed where no scenario file names one")
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


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where results go."""

    top: int = option(
        10, "How many layouts to print, each with its best batch.", minimum=1, group=_RESULTS
    )
    out: Path | None = option(
        None,
        "Write a page with pictures here (HTML).",
        names=("--page", "--out"),
        syntax="output",
        group=_RESULTS,
    )
    candidates: Path | None = option(
        None,
        "Write every distinct point here, ruled out or not, as .parquet or .csv.",
        syntax="table",
        group=_RESULTS,
    )
    generate: Path | None = option(
        None,
        "Write the best deployment that meets the targets here: commands, Kubernetes"
        " manifests, a job that measures it. Needs finalists.",
        syntax="folder",
        group=_RESULTS,
    )
    server: str = option(
        "", "With --generate: `vllm` or `sglang` (default: the engine's own).", group=_RESULTS
    )
    model_id: str = option(
        "",
        "With --generate: what the server loads, a name on Hugging Face or a path.",
        group=_RESULTS,
    )


@with_option_groups
def serving(  # noqa: PLR0913, PLR0917 - groups of options
    context: typer.Context,
    question: QuestionOptions,
    answers: Annotated[Answers, OptionsOf(ServingSearchRequest)],
    targets: TargetOptions,
    effort: EffortOptions,
    results: ResultOptions,
    scenario: Annotated[
        Path | None,
        typer.Argument(help="Scenario file (YAML): its workload, engine and limits. Or options."),
    ] = None,
) -> None:
    """Find the best deployments of a model: devices, layouts, batches, modes, formats.

    Every point is answered in closed form for a steady load and ranked; the best are simulated
    request by request at that load. Equal ranks are ties: the estimates' error cannot tell them
    apart. What is ruled out is counted by its reason. The exit status is 3 where no deployment, or
    none that was simulated, meets the targets.

    - 16 GPUs for Llama 3.1 70B with 4000 tokens in and 1000 out:
    `foretoken search serving --model llama-3.1-70b --device h200_sxm --gpus 16 --isl 4000
    --osl 1000 --ttft 2s --tpot 30ms --page report.html`

    - The cheapest way to carry 20 requests/s: `... --devices h200_sxm,h100_sxm --price
    h200_sxm=3.5 --price h100_sxm=2.5 --target-rps 20 --objective cost`

    - A percentile, and only some of the space: `... --limit "ttft p99 2s" --mode aggregated --tp
    2,4 --batch 32:256 --quantization none,fp8`

    - From the answer to a cluster: `... --generate deployment --server vllm`

    - Your own workload: `foretoken search serving docs/examples/serving.yaml --gpus 4`

    Ctrl-C cancels the search. After a crash the same command goes on where it was. A search that a
    service runs goes on without its watcher: `--job NAME` watches it again.
    """
    state = state_of(context)
    num_finalists = answers.given["num_finalists"]
    if results.generate is not None and not effort.job and num_finalists == 0:
        raise typer.BadParameter("--generate needs a simulated deployment: --finalists 1 or more")
    with open_composition(state) as services:
        _check_launch(results)
        simulator = services.simulator
        if effort.job:
            job = simulator.get_job(effort.job)
        else:
            request = _bound(build_request(scenario, question, targets, answers), results)
            job = simulator.create_serving_search(request)
            note_search(job)
        report = _watch(simulator, job)
        report = show_nearest(report, list_installed_runs(services.catalog, state.config.starter))
        title = _title(report)
        state.print_object(
            _without_columns(report),
            lambda: report_table(title, report, results.top),
            report.echo,
        )
        _write(report, title, results)


def _bound(request: ServingSearchRequest, results: ResultOptions) -> ServingSearchRequest:
    """Return a search bounded by what the server can run that files are written for.

    Raises:
        InvalidRequestError: no files are written for its engine, and no server is named.

    """
    if results.generate is None:
        return request
    profiles = request.space.profiles or (request.scenario.engine.profile,)
    engines = {profile: find_engine(profile) for profile in profiles}
    server = find_server(results.server) if results.server else None
    for profile, engine in engines.items():
        own = server or find_server_of(engine)
        if engine.engine != own.name:
            note(
                f"files are written for {own.name}: what it cannot run is left out; times are by"
                f" the rules of {profile}"
            )
    return replace(request, space=replace(request.space, server=results.server))


def _check_launch(results: ResultOptions) -> None:
    """Refuse a server that is not known before anything is computed."""
    if results.generate is None:
        if results.server or results.model_id:
            raise typer.BadParameter("--server and --model-id are of --generate DIR")
        return
    if results.server:
        find_server(results.server)


def _write(report: ServingSearchReport, title: str, results: ResultOptions) -> None:
    if results.candidates is not None:
        write_columns(report.candidates, results.candidates)
        note(f"candidates written to {results.candidates}")
    if results.out is not None:
        from foretoken.simulator.report.page import result_sections

        write_page(results.out, title, result_sections(report))
    met = [finalist.is_met for finalist in report.finalists]
    leave_unless(bool(report.best) and (any(met) or not met))
    if results.generate is not None:
        options = LaunchOptions(engine=results.server, model_id=results.model_id)
        _launch_best(report, results.generate, options)


def _watch(simulator: SimulatorPort, job: Job) -> ServingSearchReport:
    with show_progress("search") as update:
        wait_for_job(simulator, job, update)
    return simulator.get_serving_search_report(job.job_id)


def _title(report: ServingSearchReport) -> str:
    """Return what was searched for: model, most devices, lengths."""
    request: Mapping[str, Any] = json.loads(report.request_json) if report.request_json else {}
    scenario, space = request.get("scenario", {}), request.get("space", {})
    devices = ", ".join(space.get("devices") or [scenario.get("device", "")])
    model = scenario.get("model", {}).get("name", "")
    return f"{model} on up to {space.get('max_devices', 0)} x {devices}"


def _without_columns(report: ServingSearchReport) -> ServingSearchReport:
    """Return a report without the requests and the series of its finalists, which are long."""
    finalists = tuple(
        replace(
            finalist,
            report=replace(finalist.report, requests=RequestColumns(), series=SeriesColumns()),
        )
        for finalist in report.finalists
    )
    return replace(report, finalists=finalists)


def _launch_best(report: ServingSearchReport, folder: Path, options: LaunchOptions) -> None:
    """Write the files of the best deployment that met the targets when it was simulated.

    Raises:
        InvalidRequestError: none did, or no server can be started that way.

    """
    chosen = find_launched(report)
    scenario = read_finalist(report, chosen)
    paths = write_deployment(scenario, folder, options)
    if chosen.name != report.best:
        note(f"{report.best} misses the targets when simulated")
    note(f"{chosen.name} written to {folder}: {', '.join(path.name for path in paths)}")


def find_launched(report: ServingSearchReport) -> Finalist:
    """Return the first finalist that meets the targets.

    Raises:
        InvalidRequestError: there is none.

    """
    for finalist in report.finalists:
        if finalist.is_met:
            return finalist
    reason = (
        "no finalist meets the targets: simulate more (--finalists), or ask for less"
        if report.finalists
        else "nothing was simulated that could be written: no deployment qualifies"
    )
    raise InvalidRequestError.of_field("--generate", reason)
