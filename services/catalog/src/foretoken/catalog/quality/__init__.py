"""Judge measurements: each row by itself at ingest, and stored rows against each other."""

from foretoken.catalog.quality.ingest import Judged, judge

__all__ = ["Judged", "judge"]
