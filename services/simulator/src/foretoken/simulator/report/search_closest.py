"""What came closest in a search that found nothing, and what would let it in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foretoken.simulator.report.search_candidates import Row

_MAX_SHOWN = 3
_LATENCIES = ("ttft_ms", "tpot_ms")


@dataclass(frozen=True, slots=True)
class Closest:
    """The closest of all candidates that one reason rules out."""

    name: str
    verdict: str
    reason: str
    remedy: str


_REMEDIES: Mapping[str, str] = {
    "ttft_ms": "a looser limit, shorter prompts, more tensor parallelism or another device",
    "tpot_ms": "a looser limit, more tensor parallelism, fewer bits per weight or another device",
    "itl_ms": "a looser limit, or steps of fewer tokens",
    "e2e_latency_ms": "a looser limit, shorter answers or more tensor parallelism",
    "devices": "more GPUs, or a lower rate",
    "memory": (
        "more GPUs for each replica (tensor or pipeline parallelism), smaller batches or fewer bits"
        " per weight"
    ),
    "layout": "other degrees of parallelism",
    "engine": "another engine, or what this one has",
    "bound": "smaller batches, or steps of more tokens",
}


def find_closest(rows: Sequence[Row]) -> list[Closest]:
    """Return for each reason the candidate that was nearest; those that got furthest first.

    Of latencies it is the lowest, of GPUs the fewest, of memory the smallest batch on the largest
    replica.
    """
    found: dict[str, Row] = {}
    for row in rows:
        verdict = row["verdict"]
        if row["rank"] or (verdict in _LATENCIES and row[verdict] <= 0):
            continue
        nearness = _nearness(verdict)
        if verdict not in found or nearness(row) < nearness(found[verdict]):
            found[verdict] = row
    ordered = sorted(found, key=lambda verdict: [*_REMEDIES, verdict].index(verdict))
    return [
        Closest(
            name=found[verdict]["name"],
            verdict=verdict,
            reason=found[verdict]["reason"],
            remedy=_REMEDIES.get(verdict, ""),
        )
        for verdict in ordered[:_MAX_SHOWN]
    ]


def _nearness(verdict: str) -> Callable[[Row], tuple[float, ...]]:
    """Return what is least for the nearest candidate that this verdict rules out."""
    if verdict in _LATENCIES:
        return lambda row: (row[verdict],)
    if verdict == "memory":
        return lambda row: (-row["tp"] * row["pp"] * row["ep"], row["batch_size"])
    return lambda row: (row["num_devices"], row["batch_size"])
