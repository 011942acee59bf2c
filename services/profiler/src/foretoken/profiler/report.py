"""What came of a profile: counts, seconds and intervals by operator, and how repeats agree."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median

import numpy as np

from foretoken.domain import schema
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.measurements.profiling import OperatorProfile, ProfileReport
from foretoken.domain.ports import CatalogPort
from foretoken.profiler.planning.coverage import Point, point_of_call
from foretoken.profiler.recording.batch_sender import HandOver, wait_for_catalog
from foretoken.profiler.recording.spool import Row


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


# Reasons of failures that a report tells.
_NUM_REASONS = 5


@dataclass(slots=True)
class _Operator:
    counts: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    intervals: list[float] = field(default_factory=list)


class ReportBuilder:
    """Counts outcomes as they come. `earlier` are the medians that the same profile had before."""

    def __init__(self, earlier: Mapping[Point, Sequence[float]] | None = None) -> None:
        """Begin with nothing timed."""
        self._medians_us: defaultdict[Point, list[float]] = defaultdict(list)
        for point, medians_us in (earlier or {}).items():
            self._medians_us[point].extend(medians_us)
        self._operators: defaultdict[str, _Operator] = defaultdict(_Operator)
        self._failures: Counter[str] = Counter()

    @property
    def num_done(self) -> int:
        """Calls with an outcome."""
        return sum(entry.counts["done"] for entry in self._operators.values())

    @property
    def num_failed(self) -> int:
        """Calls that could not be timed."""
        return sum(entry.counts["failed"] for entry in self._operators.values())

    def add(
        self, call: OperatorCall, row: Row, wall_s: float, interval_ratio: float | None
    ) -> None:
        """Take the outcome of a call; the interval of its median where it has one."""
        entry = self._operators[call.operator]
        entry.counts["done"] += 1
        entry.wall_s += wall_s
        if row["status"] != "ok":
            entry.counts["failed"] += 1
            self._failures[f"{call.operator}: {row['status_reason']}"] += 1
            return
        entry.counts["flagged"] += bool(row["flags"])
        if interval_ratio is not None and np.isfinite(interval_ratio):
            entry.intervals.append(interval_ratio)
        self._medians_us[point_of_call(call)].append(float(row["latency_us_median"]))

    def replace(self, operator: str, row: Row, wall_s: float) -> None:
        """Take the outcome of a call that is timed again because its first row was flagged."""
        entry = self._operators[operator]
        entry.wall_s += wall_s
        entry.counts["flagged"] -= row["status"] == "ok" and not row["flags"]

    @property
    def failures(self) -> tuple[str, ...]:
        """Why calls failed, the most frequent reasons first, as notes of a report."""
        return failure_notes(self._failures)

    def doubt(self, operator: str) -> None:
        """Note that a row got its first flag after it was taken."""
        self._operators[operator].counts["flagged"] += 1

    def build(self, **optional: object) -> ProfileReport:
        """Return the report; `optional` are what only the run knows."""
        operators = tuple(
            OperatorProfile(
                operator=name,
                num_measured=entry.counts["done"] - entry.counts["failed"],
                num_failed=entry.counts["failed"],
                num_flagged=entry.counts["flagged"],
                wall_s=entry.wall_s,
                interval_ratio=median(entry.intervals) if entry.intervals else 0.0,
            )
            for name, entry in sorted(self._operators.items())
        )
        differences = repeat_differences(self._medians_us.values())
        return ProfileReport(
            num_measured=self.num_done - self.num_failed,
            num_failed=self.num_failed,
            num_flagged=sum(entry.num_flagged for entry in operators),
            num_repeats=len(differences),
            repeat_median_ratio=float(np.percentile(differences, 50)) if differences else 0.0,
            repeat_p90_ratio=float(np.percentile(differences, 90)) if differences else 0.0,
            operators=operators,
            **optional,  # type: ignore[arg-type]
        )


def failure_notes(reasons: Mapping[str, int]) -> tuple[str, ...]:
    """Return what a report says of failures by reason, the most frequent first."""
    frequent = Counter(reasons).most_common(_NUM_REASONS)
    lines = [f"{count:,} failed: {reason}" for reason, count in frequent]
    num_others = sum(reasons.values()) - sum(count for _, count in frequent)
    if num_others:
        lines.append(f"{num_others:,} failed for other reasons: column status_reason of the run")
    return tuple(lines)


def repeat_differences(medians_us: Iterable[Sequence[float]]) -> list[float]:
    """Return, of each point timed more than once, the first two's difference over their mean."""
    return [
        2.0 * abs(first - second) / (first + second)
        for first, second in (values[:2] for values in medians_us if len(values) > 1)
    ]
