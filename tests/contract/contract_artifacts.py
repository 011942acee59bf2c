"""Files that tests store in a catalog."""

import hashlib
from dataclasses import replace
from typing import Any

from foretoken.domain.measurements.measurement import Artifact

KIND = "latency_models"
SMALL = b"a model"
# More than two messages of 2 MiB, and no multiple of any piece.
LARGE = bytes(range(256)) * (5 * 2**12) + b"end"


def make_artifact(name: str, content: bytes, **changes: Any) -> Artifact:
    """Return what is true of a content; other fields by name."""
    artifact = Artifact(
        kind=KIND,
        name=name,
        content_hash=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        created_at="2026-01-02T03:04:05Z",
        metadata_json='{"num_rows": 12}',
    )
    return replace(artifact, **changes)
