"""The columns of a run can be gone through piece by piece."""

from dataclasses import MISSING, fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from serving_records import TinyRequest, tiny_runs

from foretoken.simulator.serving.record import ServingRecord, StepRecord, split_steps

# Columns that not every run has are left out.
_NAMES = [column.name for column in fields(StepRecord) if column.default is MISSING]


@given(run=tiny_runs(), size=st.integers(1, 9))
def test_pieces_of_the_steps_are_all_of_them(
    run: tuple[list[TinyRequest], ServingRecord], size: int
) -> None:
    """In order; a prefill is in the piece its step is in, and counts it from there."""
    for steps in run[1].steps:
        pieces = list(split_steps(steps, size))
        sizes = [len(piece.end_ns) for piece in pieces]
        assert max(sizes) <= size
        starts = np.cumsum([0, *sizes])
        for name in _NAMES:
            columns = [getattr(piece, name) for piece in pieces]
            if name == "prefill_step":
                columns = [column + at for column, at in zip(columns, starts, strict=False)]
            assert np.concatenate(columns).tolist() == getattr(steps, name).tolist()
