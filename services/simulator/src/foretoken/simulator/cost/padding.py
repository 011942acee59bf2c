"""Tokens that a step computes for nothing: to a captured size, or to whole tiles of a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.simulator.grid import Flags, Ints

# GEMM kernels compute whole tiles of rows, so a count costs as much as the next multiple: (token
# counts up to, rounded up to a multiple of). Tensor cores multiply 16 rows at once, and published
# operator profiles are no finer; beyond, coarser steps keep the tables small, within 3 %.
_TILES = ((64, 1), (2048, 16), (8192, 64), (2**62, 256))


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRule:
    """Batches of `sizes` tokens were captured, for steps that only decode, for others, or both.

    With `is_full` those that only decode were captured whole, attention included. Steps of other
    sizes are padded to the next, or with `is_exact` run outside a graph.
    """

    sizes: tuple[int, ...] = ()
    is_full: bool = False
    is_exact: bool = False
    pads_decodes: bool = False
    pads_mixed: bool = False

    @property
    def largest(self) -> int:
        """The largest captured batch."""
        return self.sizes[-1] if self.sizes else 0

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """The sizes that steps which only decode are padded to."""
        return self.sizes if self.pads_decodes and not self.is_exact else ()

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """The sizes that steps with prompts are padded to."""
        return self.sizes if self.pads_mixed and not self.is_exact else ()

    def captures(self, num_tokens: Ints) -> Flags:
        """Return which steps of so many tokens, before padding or after, have a graph."""
        return np.isin(num_tokens, self.sizes) if self.is_exact else num_tokens <= self.largest


def graph_rule(engine: EngineProfile) -> GraphRule:
    """Return the rule of an engine; without graphs no size counts."""
    modes = engine.graph_mode.split("+")
    return GraphRule(
        sizes=tuple(sorted(engine.graph_capture_sizes)) if modes != ["none"] else (),
        is_full="full" in modes,
        is_exact=not engine.pads_to_graphs,
        pads_decodes="full" in modes or "piecewise" in modes,
        pads_mixed="piecewise" in modes,
    )


def padded_tokens(max_tokens: int, sizes: Sequence[int]) -> Ints:
    """Return, for 0 to `max_tokens` tokens of a step, how many it costs as much as.

    An engine without work that runs along in lock step computes one.
    """
    counts = np.maximum(np.arange(max_tokens + 1, dtype=np.int64), 1)
    padded = counts.copy()
    start = 0
    for limit, multiple in _TILES:
        is_here = (counts > start) & (counts <= limit)
        padded[is_here] = -(-counts[is_here] // multiple) * multiple
        start = limit
    if sizes:
        captured = np.array(sizes, dtype=np.int64)
        is_captured = counts <= captured[-1]
        padded[is_captured] = captured[np.searchsorted(captured, counts[is_captured])]
    return padded
