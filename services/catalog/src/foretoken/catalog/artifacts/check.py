"""What an artifact must say of itself before it is stored."""

import re
from datetime import UTC, datetime

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.artifact import Artifact
from foretoken.domain.name import check_name
from foretoken.domain.text_file import parse_json

# A hundred of these, a page of a list, fit into a message of 16 MiB.
MAX_METADATA_BYTES = 128 * 2**10
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_artifact(artifact: Artifact, max_bytes: int) -> None:
    """Check what is said of a file of at most `max_bytes`.

    Raises:
        InvalidRequestError: a field cannot be right, or the file is too large; names the field.

    """
    for field in ("kind", "name"):
        check_name(getattr(artifact, field), field)
    if not _SHA256.fullmatch(artifact.content_hash):
        raise InvalidRequestError.of_field(
            "content_hash", "is the content's SHA-256: 64 digits of 0-9 and a-f"
        )
    if artifact.num_bytes < 0:
        raise InvalidRequestError.of_field("num_bytes", "must not be negative")
    if artifact.num_bytes > max_bytes:
        raise InvalidRequestError.of_field(
            "num_bytes",
            f"is {artifact.num_bytes}, the catalog keeps files of up to {max_bytes} bytes; raise "
            "its max_artifact_bytes",
        )
    parse_time(artifact.created_at)
    _check_metadata(artifact.metadata_json)


def parse_time(created_at: str) -> datetime:
    """Return the moment that a time in UTC says.

    Raises:
        InvalidRequestError: it is not ISO 8601, or not in UTC.

    """
    try:
        moment = datetime.fromisoformat(created_at)
    except ValueError as err:
        raise InvalidRequestError.of_field("created_at", f"is not ISO 8601: {err}") from err
    if moment.utcoffset():
        raise InvalidRequestError.of_field("created_at", f"{created_at} is not in UTC")
    return moment.replace(tzinfo=UTC)


def _check_metadata(text: str) -> None:
    if len(text.encode()) > MAX_METADATA_BYTES:
        raise InvalidRequestError.of_field(
            "metadata_json", f"exceeds {MAX_METADATA_BYTES} bytes; put it into the file"
        )
    parse_json(text, "metadata_json")
