"""The best cut as an integer program, solved by HiGHS.

A variable for every node and stage tells whether the node is in that stage or one before: it falls
along the nodes and rises along the stages, so stages are contiguous without further rules. The
difference of two stages is what a stage has, the difference of two nodes is where it ends; costs,
transfers and bytes are linear in both.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import (  # type: ignore[import-untyped]
    Bounds,
    LinearConstraint,
    milp,
)
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from foretoken.simulator.grid import Floats
from foretoken.simulator.search.placement.chain import Chain, Cut, PartitionMethod
from foretoken.simulator.search.placement.partition.min_max import cut_min_max

# Seconds that the solver may take for one chain.
TIME_LIMIT_S = 10.0
_TIME_LIMIT_STATUS = 1
_ROUNDING = 1 + 1e-9


def cut_by_program(chain: Chain, time_limit_s: float = TIME_LIMIT_S) -> Cut:
    """Return the cut that the solver finds; its note says so if the time limit stopped it."""
    known = cut_min_max(chain)
    if chain.num_stages == 1:
        return Cut.at([chain.num_nodes], chain, is_optimal=True)
    program = _Program(chain, known.longest)
    result = program.solve(time_limit_s)
    stopped = result.status == _TIME_LIMIT_STATUS
    note = f"HiGHS was stopped after {time_limit_s:g} s, before it knew the best" if stopped else ""
    if result.x is None:
        # The program looks below the known cut: nothing found there in time leaves that one.
        return Cut(num_nodes=known.num_nodes, longest=known.longest, note=note)
    ends = [*program.read_ends(result.x), chain.num_nodes]
    found = Cut.at(ends, chain, is_optimal=not stopped, note=note)
    # The known cut is within the solver's tolerance of the best where the solver's is longer.
    return found if found.longest <= known.longest else replace(known, is_optimal=not stopped)


class _Program:
    """The matrices of a chain: variables by (node, stage but the last), then the longest stage."""

    def __init__(self, chain: Chain, longest: float) -> None:
        self._chain = chain
        self._longest = longest
        self._num_cuts = chain.num_stages - 1
        self._num_variables = chain.num_nodes * self._num_cuts + 1
        # Lengths as shares of a typical one: solvers compare with absolute tolerances.
        self._unit = float(chain.costs.sum(axis=0).max()) / chain.num_stages or 1.0

    def solve(self, time_limit_s: float) -> Any:
        """Return what the solver says."""
        objective = np.zeros(self._num_variables)
        objective[-1] = 1.0
        return milp(
            objective,
            integrality=np.concatenate([np.ones(self._num_variables - 1), [0]]),
            bounds=self._bounds(),
            constraints=[*self._order(), self._lengths(), *self._memory()],
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )

    def read_ends(self, values: Floats) -> list[int]:
        """Return where stages end."""
        is_before = values[:-1].reshape(self._chain.num_nodes, self._num_cuts) > 1 / 2
        ends: list[int] = is_before.sum(axis=0).tolist()
        return ends

    def _bounds(self) -> Bounds:
        """Let every stage have a node, and none be longer than the cut that is known."""
        nodes = np.arange(self._chain.num_nodes)[:, None]
        stages = np.arange(self._num_cuts)
        low = (nodes <= stages).astype(np.float64)
        high = (nodes < self._chain.num_nodes - self._num_cuts + stages).astype(np.float64)
        longest = self._longest / self._unit * _ROUNDING
        return Bounds(np.append(low, 0.0), np.append(high, longest))

    def _variable(self, node: Any, stage: Any) -> Any:
        return node * self._num_cuts + stage

    def _order(self) -> list[LinearConstraint]:
        """Let what is in a stage or before be so for the nodes before, and in the stages after.

        A stage ends at least one node after the one before.
        """
        num_nodes, num_cuts = self._chain.num_nodes, self._num_cuts
        found = []
        for shift, size in (((1, 0), (num_nodes - 1, num_cuts)), ((1, 1), (num_nodes, num_cuts))):
            node, stage = np.indices((num_nodes - 1, size[1] - shift[1])).reshape(2, -1)
            if len(node):
                later = self._variable(node + shift[0], stage + shift[1])
                earlier = self._variable(node, stage)
                # Along nodes it falls; a node after the end of a stage is in the next or before.
                pair = (earlier, later) if shift == (1, 0) else (later, earlier)
                found.append(self._constraint([(1.0, pair[0]), (-1.0, pair[1])], 0.0, np.inf))
        return found

    def _constraint(
        self, terms: list[tuple[float, Any]], low: float, high: float
    ) -> LinearConstraint:
        """Return one rule per entry of the terms' variables."""
        rows = np.arange(len(terms[0][1]))
        matrix = coo_array(
            (
                np.concatenate([np.full(len(rows), factor) for factor, _ in terms]),
                (np.tile(rows, len(terms)), np.concatenate([which for _, which in terms])),
            ),
            shape=(len(rows), self._num_variables),
        )
        return LinearConstraint(matrix.tocsc(), low, high)

    def _sums(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return by stage what its nodes add up to: factors of variables, and a constant.

        `weights` has a row per node and a column per stage.
        """
        num_nodes, num_cuts = self._chain.num_nodes, self._num_cuts
        factors = np.zeros((num_cuts + 1, num_nodes, num_cuts))
        for stage in range(num_cuts):
            factors[stage, :, stage] = weights[:, stage]
            factors[stage + 1, :, stage] = -weights[:, stage + 1]
        constants = np.zeros(num_cuts + 1)
        constants[-1] = weights[:, -1].sum()
        return factors, constants

    def _lengths(self) -> LinearConstraint:
        """Let no stage be longer than the longest."""
        chain, num_cuts = self._chain, self._num_cuts
        factors, constants = self._sums(chain.costs[:, list(chain.kinds)] / self._unit)
        if chain.has_transfers:
            for stage in range(num_cuts):
                sent = chain.transfers[:, stage] / self._unit
                factors[stage, :-1, stage] += sent
                factors[stage, 1:, stage] -= sent
        flat = np.hstack([factors.reshape(num_cuts + 1, -1), np.full((num_cuts + 1, 1), -1.0)])
        return LinearConstraint(coo_array(flat).tocsc(), -np.inf, -constants)

    def _memory(self) -> list[LinearConstraint]:
        """Let every stage have the bytes it needs."""
        chain = self._chain
        if not chain.has_memory:
            return []
        unit = float(chain.bytes_there.max()) or 1.0
        factors, constants = self._sums(chain.bytes_needed / unit)
        flat = np.hstack([factors.reshape(chain.num_stages, -1), np.zeros((chain.num_stages, 1))])
        limit = chain.bytes_there / unit - constants
        return [LinearConstraint(coo_array(flat).tocsc(), -np.inf, limit)]


METHOD = PartitionMethod(name="ilp", cut=cut_by_program)
