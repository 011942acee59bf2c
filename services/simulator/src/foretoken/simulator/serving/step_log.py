"""The steps a replica ran, as columns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.simulator.serving.batch import StepShape

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepColumns:
    """One entry per step; prefills apart, each with the step it belongs to."""

    end_ns: Ints
    num_tokens: Ints
    num_rows: Ints
    num_decodes: Ints
    decode_kv_tokens: Ints
    decode_kv_tokens_max: Ints
    num_used_blocks: Ints
    num_seqs: Ints
    prefill_step: Ints
    prefill_tokens: Ints
    prefill_context: Ints


class StepLog:
    """Collects steps; a run of decoding steps, whose contexts only grow, is one entry."""

    def __init__(self) -> None:
        self.end_ns: list[int] = []
        self.num_used_blocks: list[int] = []
        self._shapes: list[StepShape] = []
        self._counts: list[int] = []

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return len(self.end_ns)

    def add(self, shape: StepShape, count: int) -> None:
        """Note `count` steps that began with `shape`; their ends and blocks are noted apart."""
        self._shapes.append(shape)
        self._counts.append(count)

    def columns(self) -> StepColumns:
        """Return all steps."""
        counts = np.array(self._counts, dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        scalars = np.array([s[:5] for s in self._shapes], dtype=np.int64).reshape(-1, 5)
        tokens, rows, decodes, kv, kv_max = np.repeat(scalars, counts, axis=0).T
        age = np.arange(counts.sum()) - np.repeat(firsts, counts)
        prefills = np.array(
            [
                (first, *prefill)
                for first, shape in zip(firsts.tolist(), self._shapes, strict=True)
                for prefill in shape.prefills
            ],
            dtype=np.int64,
        ).reshape(-1, 3)
        num_prefills = np.bincount(prefills[:, 0], minlength=self.num_steps)
        return StepColumns(
            end_ns=np.array(self.end_ns, dtype=np.int64),
            num_tokens=tokens,
            num_rows=rows,
            num_decodes=decodes,
            decode_kv_tokens=kv + age * decodes,
            decode_kv_tokens_max=kv_max + age,
            num_used_blocks=np.array(self.num_used_blocks, dtype=np.int64),
            num_seqs=decodes + num_prefills,
            prefill_step=prefills[:, 0],
            prefill_tokens=prefills[:, 1],
            prefill_context=prefills[:, 2],
        )
