"""Import: measurements of other tools from a file, or NVIDIA's from the package index."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foretoken.app.web.question import file_name_of, find_problems, stored
from foretoken.app.web.visit import Redirect, Sent, Shown, Upload, Visit, send_json
from foretoken.catalog.dataset import DATASET_TOOL
from foretoken.catalog.importing import ImportPlan, ImportRequest, all_importers, find_importer
from foretoken.catalog.installing import NVIDIA, InstallRequest, open_install
from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError, InvalidRequestError, NotAllowedError
from foretoken.domain.hardware.device import all_devices

_FILE, _MAPPING = "file", "mapping"
_RIGHT = "record"


def show(visit: Visit) -> Shown:
    """Show the forms, and what is being imported."""
    return _show(visit, visit.asked, {})


def start(visit: Visit) -> Shown | Redirect:
    """Start an import of a file that was sent; go to where it is looked at."""
    try:
        _check_right(visit)
        upload = visit.uploads.get(_FILE)
        if upload is None or not upload.content:
            raise InvalidRequestError.of_field(_FILE, "choose a file")
        importer = find_importer(visit.posted.get("format", ""))
        request = ImportRequest(
            path=Path(file_name_of(upload.name)),
            device=visit.posted.get("device", "").strip(),
            topology=visit.posted.get("topology", "").strip(),
        )
    except ForetokenError as err:
        return _show(visit, visit.posted, find_problems(err), status=400)
    title = f"{importer.name}: {request.path}"
    mapping = visit.uploads.get(_MAPPING)
    begun = visit.imports.start(
        title, visit.catalog, lambda _: _open_upload(upload, mapping, importer.name, request)
    )
    return Redirect(f"/catalog/imports/{begun.job_id}")


def install(visit: Visit) -> Shown | Redirect:
    """Start an installation of NVIDIA's tables, which pip downloads."""
    try:
        _check_right(visit)
        request = InstallRequest(
            dataset=NVIDIA,
            systems=visit.posted.get("systems", "").strip(),
            engines=visit.posted.get("engines", "").strip(),
        )
    except InvalidRequestError as err:
        return _show(visit, visit.posted, find_problems(err), status=400)
    title = " ".join(filter(None, (NVIDIA, request.systems, request.engines)))
    begun = visit.imports.start(title, visit.catalog, partial(open_install, request))
    return Redirect(f"/catalog/imports/{begun.job_id}")


def show_one(visit: Visit) -> Shown:
    """Show how far an import is."""
    found = visit.imports.get(visit.place["job"])
    return Shown(template="import.html", content={"found": found, "title": found.title})


def send_state(visit: Visit) -> Sent:
    """Send how far an import is, for the page that follows it."""
    found = visit.imports.get(visit.place["job"])
    return send_json({**schema.encode(found), "is_final": found.is_final})


def cancel(visit: Visit) -> Redirect:
    """Have an import stop; go to where it is looked at."""
    _check_right(visit)
    visit.imports.cancel(visit.place["job"])
    return Redirect(f"/catalog/imports/{visit.place['job']}")


def resume(visit: Visit) -> Redirect:
    """Start an import that failed or was cancelled once more; go to the new one."""
    _check_right(visit)
    begun = visit.imports.resume(visit.place["job"], visit.catalog)
    return Redirect(f"/catalog/imports/{begun.job_id}")


@contextmanager
def _open_upload(
    upload: Upload, mapping: Upload | None, importer: str, request: ImportRequest
) -> Iterator[ImportPlan]:
    """Yield the plan of a file that was sent; the ZIP archive of a dataset is unpacked."""
    with ExitStack() as held:
        path = held.enter_context(stored(upload))
        options = {}
        if mapping is not None and mapping.content:
            options[_MAPPING] = str(held.enter_context(stored(mapping)))
        try:
            if importer == DATASET_TOOL and path.suffix == ".zip":
                yield held.enter_context(open_install(InstallRequest(dataset=str(path))))
            else:
                yield find_importer(importer).read(replace(request, path=path, options=options))
        except InvalidRequestError as err:
            # It names the file where it lay for the moment.
            said = err.message.removeprefix("path: ").replace(f"{path.parent}/", "")
            raise InvalidRequestError.of_field(_FILE, said) from err


def _check_right(visit: Visit) -> None:
    if not visit.may(_RIGHT):
        raise NotAllowedError("importing measurements takes the right `record`")


def _show(visit: Visit, given: Any, problems: dict[str, str], status: int = 200) -> Shown:
    importers = {name: importer.summary for name, importer in all_importers().items()}
    content = {
        "given": given,
        "problems": problems,
        "importers": importers,
        "devices": {device.name: device.description for device in all_devices().values()},
        "imports": visit.imports.list(),
    }
    return Shown(template="imports.html", content=content, status=status)
