"""Results that a catalog keeps of simulations and searches: listed, found and read."""

import json
import logging
import re
from collections.abc import Iterable, Sequence

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.ports import CatalogPort
from foretoken.domain.results.result import REPORT_CLASSES, RESULT_ARTIFACT, AnyReport, KeptResult
from foretoken.wire.result_file import label_file, read_label, unpack_report

_log = logging.getLogger(__name__)

# The newest result, and those before it: `latest~1` is the one before the newest.
_LATEST = re.compile(r"latest(?:~(\d+))?")
# More of those that a beginning fits are counted.
_MAX_NAMED = 4


def list_results(catalog: CatalogPort) -> tuple[KeptResult, ...]:
    """Return what is known of the kept results, newest first; what is damaged is left out."""
    return describe_results(catalog.list_artifacts(RESULT_ARTIFACT))


def find_result(catalog: CatalogPort, name: str) -> KeptResult:
    """Return the result of a job id, of the beginning of one or of its last part, or of `latest`.

    `latest~1` is the one before the newest.

    Raises:
        UnknownJobError: there is none; the nearest are named.
        InvalidRequestError: a beginning that several have.

    """
    return pick_result(list_results(catalog), name)


def pick_result(results: Sequence[KeptResult], name: str) -> KeptResult:
    """Return one of the results, which are newest first, as `find_result` does."""
    if (match := _LATEST.fullmatch(name)) is not None:
        place = int(match[1] or 0)
        if place >= len(results):
            kept = f"{len(results)} are" if len(results) != 1 else "one is"
            raise UnknownJobError(f"there is no {name}: {kept} kept", name=name)
        return results[place]
    exact = [result for result in results if result.job_id == name]
    begun = [result for result in results if name and _begins(result.job_id, name)]
    found = exact or begun
    if not found:
        if not results:
            raise UnknownJobError(
                f"no result is kept, so not {name!r}; simulate something first, or say where the"
                " catalog is that keeps results: --endpoint catalog=HOST:PORT",
                name=name,
            )
        raise UnknownJobError.named(name, [result.job_id for result in results], kind="result")
    if len(found) > 1:
        names = ", ".join(result.job_id for result in found[:_MAX_NAMED])
        more = f" and {len(found) - _MAX_NAMED:,} more" if len(found) > _MAX_NAMED else ""
        raise InvalidRequestError(f"{name!r} begins {len(found)} results: {names}{more}")
    return found[0]


def read_result(catalog: CatalogPort, name: str) -> tuple[KeptResult, AnyReport]:
    """Return a result with its report, all of its columns in it; `name` as in `find_result`."""
    result = find_result(catalog, name)
    return result, unpack_result(_read(catalog, result), result)


def export_result(catalog: CatalogPort, name: str) -> bytes:
    """Return the content of a file that `open_result` reads; `name` as in `find_result`."""
    result = find_result(catalog, name)
    return label_file(_read(catalog, result), result)


def open_result(content: bytes) -> tuple[KeptResult, AnyReport]:
    """Return the result in an exported file.

    Raises:
        InvalidRequestError: the file is none.

    """
    result = read_label(content)
    return result, unpack_result(content, result)


def delete_result(catalog: CatalogPort, name: str) -> KeptResult:
    """Forget a result, and return what was known of it; `name` as in `find_result`."""
    result = find_result(catalog, name)
    catalog.delete_artifact(RESULT_ARTIFACT, result.job_id)
    return result


def describe_results(artifacts: Iterable[Artifact]) -> tuple[KeptResult, ...]:
    """Return what artifacts say of themselves; one that says nothing sound is logged alone."""
    found = []
    for artifact in artifacts:
        try:
            found.append(_describe_result(artifact))
        except (InvalidRequestError, ValueError, RecursionError) as err:
            _log.warning("a kept result is left out name=%r: %s", artifact.name, err)
    return tuple(found)


def _describe_result(artifact: Artifact) -> KeptResult:
    """Return what an artifact says of itself; what another version has besides is left out."""
    said = json.loads(artifact.metadata_json)
    if not isinstance(said, dict):
        raise InvalidRequestError.of_field("metadata_json", "is no JSON object")
    content = {
        "kind": "",
        "title": "",
        "created_at": artifact.created_at,
        **said,
        # Which artifact it is does not depend on what that says.
        "job_id": artifact.name,
    }
    known = {name: content[name] for name in schema.field_types(KeptResult) if name in content}
    return schema.decode(KeptResult, known, artifact.name)


def _begins(job_id: str, name: str) -> bool:
    return job_id.startswith(name) or job_id.rpartition("-")[2].startswith(name)


def _read(catalog: CatalogPort, result: KeptResult) -> bytes:
    return b"".join(catalog.read_artifact(RESULT_ARTIFACT, result.job_id))


def unpack_result(content: bytes, result: KeptResult) -> AnyReport:
    """Return the report in the content of a result.

    Raises:
        InvalidRequestError: it is of a kind that this version does not know.

    """
    if result.kind not in REPORT_CLASSES:
        raise InvalidRequestError(
            f"{result.job_id} is of a kind that this version does not read: {result.kind!r}"
        )
    return unpack_report(content, REPORT_CLASSES[result.kind])
