"""Comparisons with measured runs, kept in the catalog: their pages, and the files they are of.

A page that is shown once has no address; these have one, for as long as the newest are kept.
"""

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import uuid4

from foretoken.app.web.visit import Upload, Visit
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.measurements.measurement import Artifact

_KIND: Final = "validation"
_KEPT: Final = 50
_PAGE, _FORM, _MEASURED = "page.html", "form.json", "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """A comparison: `kind` is serving or training, `correction` what was learned of it.

    `learned` are the keys that a scenario has then, as YAML; empty where nothing was calibrated.
    """

    name: str = ""
    kind: str
    title: str
    headline: str
    file_name: str
    created_at: str = ""
    learned: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationFiles:
    """What a comparison was made of, and its page."""

    page: str
    form: Mapping[str, str]
    measured: Upload


def keep_validation(visit: Visit, found: Validation, files: ValidationFiles) -> Validation:
    """Keep a comparison that the caller was allowed to make; the oldest go."""
    # The caller may plan, which is to keep results, and not to record measurements.
    catalog = visit.offered.port("catalog")
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    kept = replace(found, name=f"validation-{uuid4().hex[:12]}", created_at=now)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_PAGE, files.page)
        archive.writestr(_FORM, json.dumps(dict(files.form)))
        archive.writestr(_MEASURED, files.measured.content)
    content = packed.getvalue()
    artifact = Artifact(
        kind=_KIND,
        name=kept.name,
        content_hash=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        created_at=now,
        metadata_json=json.dumps(schema.encode(kept)),
    )
    catalog.store_artifact(artifact, (content,))
    for old in catalog.list_artifacts(_KIND)[_KEPT:]:
        catalog.delete_artifact(_KIND, old.name)
    return kept


def list_validations(visit: Visit) -> tuple[Validation, ...]:
    """Return what is kept, newest first; what another version wrote otherwise is left out."""
    found = []
    for artifact in visit.catalog.list_artifacts(_KIND):
        try:
            content: Any = json.loads(artifact.metadata_json)
            found.append(schema.decode(Validation, {**content, "name": artifact.name}))
        except (InvalidRequestError, TypeError, ValueError):
            continue
    return tuple(found)


def find_validation(visit: Visit, name: str) -> Validation:
    """Return a comparison that is kept.

    Raises:
        UnknownJobError: there is none of that name.

    """
    kept = list_validations(visit)
    found = next((one for one in kept if one.name == name), None)
    if found is None:
        raise UnknownJobError.named(name, [one.name for one in kept], kind="validation")
    return found


def forget_validation(visit: Visit, name: str) -> None:
    """Forget a comparison and the file it is of, as the caller may.

    Raises:
        UnknownJobError: there is none of that name.
        NotAllowedError: the caller lacks the right `delete`.

    """
    visit.catalog.delete_artifact(_KIND, find_validation(visit, name).name)


def read_validation(visit: Visit, found: Validation) -> ValidationFiles:
    """Return the page of a comparison, and what it was made of."""
    content = b"".join(visit.catalog.read_artifact(_KIND, found.name))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return ValidationFiles(
            page=archive.read(_PAGE).decode(),
            form=json.loads(archive.read(_FORM)),
            measured=Upload(found.file_name, archive.read(_MEASURED)),
        )
