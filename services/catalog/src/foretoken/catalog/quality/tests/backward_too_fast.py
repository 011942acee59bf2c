"""Backward passes that lack a kernel: far faster, by the forward pass, than elsewhere."""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.quality.phase_ratio import phase_ratio
from foretoken.catalog.quality.stored_row import StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

# A backward pass takes this part of what its work, or another device, makes expect. Measured: 0.69
# to 1.1 of other devices where both are sound; 0.29 and 0.43 where a kernel was missed.
_PART_OF_PEERS_MIN = 0.5
# The work of the passes is known less well: a fused loss has a third of what is counted.
_PART_OF_WORK_MIN = 0.25


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    is_backward = rows.coded["phase"].is_value("backward")
    if not rows.spec.backward_work_ratio or not is_backward.any():
        return
    sources = ("run_id", "source_file", "dtype", "framework")
    for places, table in rows.split(sources):
        ratio = phase_ratio(table)
        if ratio is None:
            continue
        peers = {d: r for d, r in rows.peer_ratios.items() if d != rows.device}
        peer = max(peers, key=lambda device: peers[device], default="")
        if peer and ratio < _PART_OF_PEERS_MIN * peers[peer]:
            reason = f"{peers[peer]:.3g} times on {peer}"
        elif ratio < _PART_OF_WORK_MIN * rows.spec.backward_work_ratio:
            reason = f"it has {rows.spec.backward_work_ratio:.3g} times the work"
        else:
            continue
        found = places[np.flatnonzero(is_backward[places])]
        yield FlaggedRows(found, f"takes {ratio:.3g} times the forward pass; {reason}")


TEST = QualityTest(
    name="backward_too_fast",
    summary="a backward pass under half of what other devices need, or a quarter of its work",
    judges=Judges.TABLES,
    find=_find,
)
