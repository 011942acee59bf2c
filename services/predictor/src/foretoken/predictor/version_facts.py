"""What the artifact of a model version says in addition to its name and time."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Self

from foretoken.domain import schema
from foretoken.domain.errors import CorruptCatalogError, InvalidRequestError
from foretoken.domain.measurements.measurement import Artifact


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionFacts:
    """The hash of the snapshot that was trained on, and how many rows of it were."""

    snapshot_hash: str
    num_rows: int

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Return what an artifact says; what another release has besides is left out.

        Raises:
            CorruptCatalogError: it does not say this, so no predictor stored it.

        """
        try:
            said = json.loads(artifact.metadata_json)
            known = {field.name: said[field.name] for field in fields(cls)}
            return schema.decode(cls, known, "metadata_json")
        except (ValueError, TypeError, KeyError, RecursionError, InvalidRequestError) as err:
            raise CorruptCatalogError(
                f"the artifact {artifact.kind}/{artifact.name} is no model version: its metadata"
                f" lacks what one says ({err!r}); delete it"
            ) from err

    def to_json(self) -> str:
        """Return them as an artifact's metadata."""
        return json.dumps(asdict(self))
