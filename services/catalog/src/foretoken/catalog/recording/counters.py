"""Counts of what was recorded since the catalog was opened."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.errors import ForetokenError


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestStatistics:
    """What was recorded. Rows and batches are new ones on disk; `num_bytes` is their Arrow data.

    `ingest_s` is the time from a batch's arrival to its receipt, once for batches stored together.
    `num_duplicates` counts batches that were there already, `rejects` those refused, by the reason
    of the error.
    """

    num_rows: int = 0
    num_bytes: int = 0
    num_batches: int = 0
    num_duplicates: int = 0
    ingest_s: float = 0.0
    rejects: Mapping[str, int] = field(default_factory=dict)


class Counters:
    """Adds up what several threads record."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._lock = threading.Lock()
        self._total = IngestStatistics()

    def add(self, part: IngestStatistics, error: Exception | None) -> None:
        """Add what was recorded, and the batch that was refused after it, if one was."""
        with self._lock:
            total = self._total
            rejects = dict(total.rejects)
            if error is not None:
                reason = getattr(error, "reason", ForetokenError.reason)
                rejects[reason] = rejects.get(reason, 0) + 1
            self._total = IngestStatistics(
                num_rows=total.num_rows + part.num_rows,
                num_bytes=total.num_bytes + part.num_bytes,
                num_batches=total.num_batches + part.num_batches,
                num_duplicates=total.num_duplicates + part.num_duplicates,
                ingest_s=total.ingest_s + part.ingest_s,
                rejects=rejects,
            )

    def read(self) -> IngestStatistics:
        """Return the counts up to now."""
        with self._lock:
            return self._total
