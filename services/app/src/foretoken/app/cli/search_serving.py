"""`foretoken search serving`: rank the deployments of a space."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.app.cli.asked_option import Answers, Ask
from foretoken.app.cli.exit_status import leave_unless
from foretoken.app.cli.option_group import with_option_groups
from foretoken.app.cli.page_file import write_page
from foretoken.app.cli.picture_file import page_option
from foretoken.app.cli.search_launch import launch_best
from foretoken.app.cli.search_options import (
    EffortOptions,
    QuestionOptions,
    TargetOptions,
    build_request,
)
from foretoken.app.cli.search_text import report_table
from foretoken.app.cli.state import (
    note,
    note_search,
    open_composition,
    show_progress,
    state_of,
)
from foretoken.app.cli.table_file import check_table_option, write_columns
from foretoken.client.job_wait import wait_for_job
from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.job import Job
from foretoken.domain.ports import SimulatorPort
from foretoken.domain.requests.search import ServingSearchReport, ServingSearchRequest
from foretoken.domain.results.report import RequestColumns, SeriesColumns
from foretoken.simulator.launch.write import LaunchOptions, find_server, find_server_of

_RESULTS = "Where results go"


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where results go."""

    top: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many layouts to print, each with its best batch.",
            rich_help_panel=_RESULTS,
        ),
    ] = 10
    out: Annotated[Path | None, page_option("--out", panel=_RESULTS)] = None
    candidates: Annotated[
        Path | None,
        typer.Option(
            help="Write every distinct point here, ruled out or not, as .parquet or .csv.",
            callback=check_table_option,
            rich_help_panel=_RESULTS,
        ),
    ] = None
    generate: Annotated[
        Path | None,
        typer.Option(
            help="Write the best deployment that meets the targets here: commands, Kubernetes"
            " manifests, a job that measures it. Needs finalists.",
            file_okay=False,
            rich_help_panel=_RESULTS,
        ),
    ] = None
    server: Annotated[
        str,
        typer.Option(
            help="With --generate: `vllm` or `sglang` (default: the engine's own).",
            rich_help_panel=_RESULTS,
        ),
    ] = ""
    model_id: Annotated[
        str,
        typer.Option(
            help="With --generate: what the server loads, a name on Hugging Face or a path.",
            rich_help_panel=_RESULTS,
        ),
    ] = ""


@with_option_groups
def serving(  # noqa: PLR0913, PLR0917 - groups of options
    context: typer.Context,
    question: QuestionOptions,
    answers: Annotated[Answers, Ask(ServingSearchRequest)],
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
    --osl 1000 --ttft 2s --tpot 30ms --out report.html`

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
        from foretoken.simulator.report.page import search_sections

        write_page(results.out, title, search_sections(report))
    met = [finalist.is_met for finalist in report.finalists]
    leave_unless(bool(report.best) and (any(met) or not met))
    if results.generate is not None:
        options = LaunchOptions(engine=results.server, model_id=results.model_id)
        launch_best(report, results.generate, options)


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
