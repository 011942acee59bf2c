"""Keep whole reports in the catalog, as artifacts."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from foretoken.domain import schema
from foretoken.domain.measurements.artifact import Artifact
from foretoken.domain.ports import CatalogPort
from foretoken.profiler.recording.batch_sender import HandOver, wait_for_catalog


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportShelf:
    """Where reports of one kind go. A catalog that is away is waited for as `hand_over` says."""

    catalog: CatalogPort
    kind: str
    hand_over: HandOver = field(default_factory=HandOver)

    def keep(
        self, name: str, report: object, facts: Mapping[str, str], on_wait: Callable[[str], None]
    ) -> Artifact:
        """Store a report as JSON under a name, with `facts` next to it.

        `on_wait` is called with what is waited for, and may raise.

        Raises:
            ForetokenError: the catalog refused it, or stayed away.

        """
        content = json.dumps(schema.encode(report)).encode()
        artifact = Artifact(
            kind=self.kind,
            name=name,
            content_hash=hashlib.sha256(content).hexdigest(),
            num_bytes=len(content),
            created_at=datetime.now(tz=UTC).isoformat(timespec="milliseconds"),
            metadata_json=json.dumps(dict(facts)),
        )
        return wait_for_catalog(
            lambda: self.catalog.store_artifact(artifact, (content,)), self.hand_over, on_wait
        )
