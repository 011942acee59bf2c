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

from foretoken.app.presentation import render_page
from foretoken.app.web.visit import Redirect, Sent, Shown, Visit
from foretoken.client.results import export_result, find_result, list_results, read_result
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import AnyReport, KeptResult
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.perfetto import serving_trace, training_trace
from foretoken.simulator.results import name_result
from foretoken.wire.arrow import read_table

_SEARCH: Final = "serving-search"
# Kinds of results that have pages of their own, with where they are.
ANSWERS: Final = {_SEARCH: "/answers", "training-search": "/strategies"}
_INLINE: Final = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", re.DOTALL)
_SHOWN: Final = 500


def show(visit: Visit, title: str = "Results") -> Shown:
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
    content = {
        "title": title,
        "results": found[:_SHOWN],
        "num_found": len(found),
        "words": visit.first("q"),
        "chosen": visit.query.get("run", []),
    }
    return Shown(template="results.html", content=content)


def show_one(visit: Visit) -> Shown | Redirect:
    """Show a result by its name, or the beginning of it: its line, and its report."""
    result, report = read(visit, visit.place["job"])
    if result.kind in ANSWERS:
        return Redirect(f"{ANSWERS[result.kind]}/{result.job_id}")
    content = {
        "result": result,
        "has_trace": isinstance(report, ServingReport | TrainingReport),
    }
    return Shown(template="result.html", content=content)


def send_report(visit: Visit) -> Sent:
    """Send the page of a result, which is whole in one file."""
    _, report = read(visit, visit.place["job"])
    return send_page(render_page(report))


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
        content = training_trace(report)
    elif isinstance(report, ServingReport):
        steps, requests = (
            read_table(visit.simulator.read_serving_table(result.job_id, name))
            for name in ("steps", "requests")
        )
        content = serving_trace(steps, requests)
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
