"""`foretoken validate steps`: predictions compared with whole steps that were measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.output_file import page_option, write_page
from foretoken.app.cli.state import (
    check_output_path,
    note,
    open_services,
    show_progress,
    stack_sections,
)
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.profiling import CLOSURE_KIND, ClosureReport, ProfileRequest
from foretoken.domain.ports import CatalogPort
from foretoken.domain.text_file import is_there, parse_json, read_json
from foretoken.simulator.validation.steps import calls_of_steps, validate_steps
from foretoken.simulator.validation.steps_page import steps_sections


def steps(
    context: typer.Context,
    reports: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|FILE]...",
            help="Reports of `foretoken profile closure`: names in the catalog, or files it wrote."
            " All of the catalog if left out.",
        ),
    ] = None,
    html: Annotated[Path | None, page_option("--html")] = None,
    request: Annotated[
        Path | None,
        typer.Option(
            help="Predict nothing; write a request for `foretoken profile --request` here that"
            " times every operator call of the steps.",
            callback=check_output_path,
        ),
    ] = None,
) -> None:
    """Predict whole steps from measurements of operators, and show how far off that is.

    The model is lowered to the operators that `transformers` runs, all of them are asked of the
    predictor, and what the host takes is added as `foretoken profile host` measured it. Nothing is
    fitted to the steps. Predict with a trained predictor: `foretoken profile`, `foretoken train`.

    Example: `foretoken validate steps closure.json --page steps.html`
    """
    with open_services(context) as (state, services):
        read = _read_reports(services.catalog, reports or ())
        if request is not None:
            _write_request(request, read)
            return
        validations = []
        with show_progress(f"predict {sum(len(item.steps) for item in read)} steps") as update:
            for done, report in enumerate(read):
                update.set(done / len(read), report.name)
                validations.append(validate_steps(report, services.predictor))
        state.print_object(
            validations, lambda: stack_sections(steps_sections(validations, has_pictures=False))
        )
        if html is not None:
            names = dict.fromkeys(f"{item.model} on {item.device}" for item in validations)
            title = f"{', '.join(names)}: steps, measured and predicted"
            write_page(html, title, steps_sections(validations))


def _write_request(path: Path, reports: Sequence[ClosureReport]) -> None:
    """Write what to profile so that each operator of the steps is measured at its very size.

    Raises:
        InvalidRequestError: the reports are of several devices.

    """
    devices = {report.device for report in reports}
    if len(devices) > 1:
        names = ", ".join(sorted(devices))
        raise InvalidRequestError.of_field("reports", f"are of several devices: {names}")
    request = ProfileRequest(device=devices.pop(), calls=calls_of_steps(reports))
    path.write_text(json.dumps(schema.encode(request), indent=1), encoding="utf-8")
    note(f"{len(request.calls)} calls written; time them: foretoken profile --request {path}")


def _read_reports(catalog: CatalogPort, names: Sequence[str]) -> list[ClosureReport]:
    """Return the reports of files and of the catalog.

    Raises:
        InvalidRequestError: one is neither a file nor in the catalog, or there is none at all.

    """
    kept = [artifact.name for artifact in catalog.list_artifacts(CLOSURE_KIND)]
    if not names and not kept:
        raise InvalidRequestError.of_field(
            "reports", "the catalog has no measured steps: run `foretoken profile closure` first"
        )
    return [_read_report(catalog, name, kept) for name in names or kept]


def _read_report(catalog: CatalogPort, name: str, kept: Sequence[str]) -> ClosureReport:
    if name in kept:
        stored = b"".join(catalog.read_artifact(CLOSURE_KIND, name))
        content = parse_json(stored, "reports", name)
    elif is_there(Path(name)):
        content = read_json(Path(name), "reports")
    else:
        known = ", ".join(kept) or "none"
        raise InvalidRequestError.of_field(
            "reports", f"{name} is no file, and the catalog has no such steps; it has {known}"
        )
    return schema.decode(ClosureReport, content, name)
