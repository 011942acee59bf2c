"""Results: what the catalog keeps of simulations and searches, which outlive the services."""

import base64
import hashlib
import io
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from foretoken.app.presentation import describe, render_page
from foretoken.app.web.visit import Redirect, Sent, Shown, Visit
from foretoken.client.results import export_result, find_result, list_results, read_result
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import StrategyFinalist, TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import AnyReport, KeptResult
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.launch.training import write_training_launch
from foretoken.simulator.report import serving_trace, trace
from foretoken.simulator.results import name_result
from foretoken.wire.arrow import read_table

_SEARCH: Final = "serving-search"
_INLINE: Final = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", re.DOTALL)
_SHOWN: Final = 500


def show(visit: Visit) -> Shown:
    """List the results, those whose title, kind or name has the words that are looked for."""
    words = visit.first("q").lower().split()
    found = [
        result
        for result in list_results(visit.catalog)
        if all(
            word in f"{result.title} {result.kind} {result.job_id} {result.headline}".lower()
            for word in words
        )
    ]
    content = {"results": found[:_SHOWN], "num_found": len(found), "words": visit.first("q")}
    return Shown(template="results.html", content=content)


def show_one(visit: Visit) -> Shown | Redirect:
    """Show a result by its name, or the beginning of it: its line, and its report."""
    result, report = read(visit, visit.place["job"])
    if result.kind == _SEARCH:
        return Redirect(f"/answers/{result.job_id}")
    content = {
        "result": result,
        "line": describe(report),
        "has_trace": isinstance(report, ServingReport | TrainingReport),
        "strategies": _list_strategies(report),
    }
    return Shown(template="result.html", content=content)


def send_report(visit: Visit) -> Sent:
    """Send the page of a result, which is whole in one file."""
    _, report = read(visit, visit.place["job"])
    return send_page(render_page(report))


def _list_strategies(report: AnyReport) -> list[tuple[StrategyFinalist, str]]:
    """Return the strategies that were simulated, each with why no files start it (else empty)."""
    if not isinstance(report, TrainingSearchReport):
        return []
    return [(one, _find_refusal(one)) for one in report.finalists]


def _find_refusal(finalist: StrategyFinalist) -> str:
    scenario = schema.decode(TrainingScenario, json.loads(finalist.scenario_json))
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_training_launch(scenario, Path(folder))
        except InvalidRequestError as err:
            return err.message
    return ""


def simulate_strategy(visit: Visit) -> Redirect:
    """Simulate a strategy for itself, with all its spans; go to the job."""
    job = visit.simulator.create_training_simulation(_find_strategy(visit, visit.posted))
    return Redirect(f"/jobs/simulator/{job.job_id}")


def send_launch(visit: Visit) -> Sent:
    """Send the files that start a strategy: the framework's arguments, a script, a job."""
    scenario = _find_strategy(visit, visit.asked)
    return pack_files(lambda folder: write_training_launch(scenario, folder), "training.zip")


def pack_files(write: Callable[[Path], object], file_name: str) -> Sent:
    """Send what is written to a folder as an archive."""
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    archive.write(path, path.relative_to(folder))
    return Sent(body=packed.getvalue(), media="application/zip", file_name=file_name)


def _find_strategy(visit: Visit, given: Mapping[str, str]) -> TrainingScenario:
    """Return the scenario of the finalist that is named.

    Raises:
        InvalidRequestError: the result is no search for strategies, or has none of that name.

    """
    _, report = read(visit, visit.place["job"])
    name = given.get("name", "")
    finalists = report.finalists if isinstance(report, TrainingSearchReport) else ()
    found = next((one for one in finalists if one.name == name), None)
    if found is None:
        raise InvalidRequestError.of_field("name", f"{name!r} was not simulated here")
    return schema.decode(TrainingScenario, json.loads(found.scenario_json))


def send_file(visit: Visit) -> Sent:
    """Send a result as a file that `foretoken compare` reads."""
    result = find_result(visit.catalog, visit.place["job"])
    content = export_result(visit.catalog, result.job_id)
    return Sent(body=content, media="application/zip", file_name=f"{result.job_id}.zip")


def send_trace(visit: Visit) -> Sent:
    """Send what a simulation did over time, as Perfetto and chrome://tracing read it.

    Raises:
        InvalidRequestError: the result is of no simulation.
        UnknownJobError: the steps of a deployment are kept by its service alone, which has not.

    """
    result, report = read(visit, visit.place["job"])
    if isinstance(report, TrainingReport):
        content = trace.chrome_trace(report)
    elif isinstance(report, ServingReport):
        steps, requests = (
            read_table(visit.simulator.read_serving_table(result.job_id, name))
            for name in ("steps", "requests")
        )
        content = serving_trace.chrome_trace(steps, requests)
    else:
        raise InvalidRequestError.of_field("job", f"a {result.kind} has no trace")
    body = json.dumps(content).encode()
    return Sent(body=body, media="application/json", file_name=f"{result.job_id}-trace.json")


def read(visit: Visit, name: str) -> tuple[KeptResult, AnyReport]:
    """Return a result of the catalog, or, just after its job, of the simulator.

    Raises:
        UnknownJobError: neither has it.

    """
    try:
        return read_result(visit.catalog, name)
    except UnknownJobError as unknown:
        job = visit.simulator.get_job(name)
        readers: Mapping[str, Callable[[str], AnyReport]] = {
            "serving": visit.simulator.get_serving_report,
            "training": visit.simulator.get_training_report,
            "capacity": visit.simulator.get_capacity_report,
            "training-search": visit.simulator.get_training_search_report,
            _SEARCH: visit.simulator.get_serving_search_report,
        }
        if job.kind not in readers:
            raise unknown from None
        report = readers[job.kind](name)
        kept = KeptResult(
            job_id=job.job_id,
            kind=job.kind,
            title=name_result(report),
            created_at=job.created_at,
        )
        return kept, report


def send_page(page: str) -> Sent:
    """Send a page that is whole in one file: what is written in it may run, and nothing else."""
    found = {"script": set[str](), "style": set[str]()}
    for kind, text in _INLINE.findall(page):
        digest = hashlib.sha256(text.encode()).digest()
        found[kind].add(f"'sha256-{base64.b64encode(digest).decode()}'")
    allowed = {kind: " ".join(sorted(hashes)) or "'none'" for kind, hashes in found.items()}
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']};"
        " style-src-attr 'unsafe-inline'; img-src data:; font-src data:; frame-ancestors 'self';"
        " base-uri 'none'; form-action 'none'"
    )
    return Sent(body=page.encode(), media="text/html", policy=policy)
