"""Files of other services that the catalog keeps: shared, and outliving every process."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """What is known of a stored file.

    `kind` says what it is for ("latency_models"), `name` is unique within the kind. `content_hash`
    is the SHA-256 of the content, given by whoever stores it and checked by the catalog.
    `created_at` is ISO 8601 UTC, `metadata_json` the owner's own. At most one artifact of a kind is
    active.
    """

    kind: str
    name: str
    content_hash: str
    num_bytes: int
    created_at: str
    metadata_json: str = "{}"
    is_active: bool = False
