"""What ends a training step, in columns: gradients reduced, parameters updated and gathered.

The collectives are those of `steps/state_exchange.py`, for all strategies that cut the model in the
same chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.communication import PlacedGroup, RankGroup
from foretoken.domain.lowering.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.lowering.training_layer import (
    check_kernels,
    reduction_kernels,
    sum_kernels,
    update_kernels,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.chunk_kinds import ChunkKind
from foretoken.simulator.search.training.transfer_calls import at_stride
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.parameters import (
    COPIED_HEAD,
    EMBEDDING,
    HEAD,
    LAYERS,
    add_places,
)
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.state_exchange import ChunkExchange
from foretoken.simulator.steps.state_sums import StateCall
from foretoken.simulator.steps.strategies import Strategies

# Where a rank of the pipeline and its peer of another stage are, given a rank with their distance.
Pair = Callable[[RankContext], PlacedGroup]


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """A call per entry, `counts` times; `numbers` are of the call book, 0 for none."""

    numbers: Ints
    counts: Ints

    def total_us(self, prices_us: Floats) -> Floats:
        """Return what all repetitions take: (variant, entry)."""
        total: Floats = prices_us[:, self.numbers] * self.counts
        return total


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkStates:
    """What a chunk's states exchange once a step, one entry per key.

    `buckets` are reduced during the last backward pass where they are hidden, `reduction` is
    always waited for, of which `kernels` compute; `gather` follows the update. A rank updates
    `num_updated`.
    """

    buckets: tuple[Calls, ...]
    reduction: tuple[Calls, ...]
    kernels: tuple[Calls, ...]
    gather: tuple[Calls, ...]
    num_updated: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateWriter:
    """Writes the ends of steps of strategies, each key one, to a book.

    `counts` are what the places of their model have, [key, figure, place], `layer_kinds` the kind
    of every layer; `rank` is one of the machine.
    """

    keys: Strategies
    counts: Ints
    layer_kinds: Sequence[int]
    rank: RankContext
    book: CallBook

    def write_chunk(self, kind: ChunkKind, table: Pair | None, mirror: Pair | None) -> ChunkStates:
        """Return what chunks of a kind exchange.

        The gradients of a tied embedding are summed over the `table` ranks of the pipeline, all
        over the `mirror` ranks that hold a chunk both; no such sum where there is no pair.
        """
        places = [EMBEDDING] * kind.has_embedding
        places += [LAYERS + self.layer_kinds[layer] for layer in kind.layers]
        places += [COPIED_HEAD if kind.has_copy else HEAD] * kind.has_head
        chunk = add_places(self.counts, places, self.keys)
        exchange = ChunkExchange.of_chunk(chunk, self.keys)
        kernels = tuple(self._kernels(exchange))
        is_tied = self.rank.model.has_tied_embedding and (kind.has_embedding or kind.has_head)
        pairs = [(table, chunk.table)] * is_tied + [(mirror, chunk.num_updated)]
        return ChunkStates(
            kernels=kernels,
            buckets=tuple(self._collective(call) for call in exchange.buckets),
            reduction=(
                *kernels,
                self._collective(exchange.norms),
                *(self._over(pair, count) for pair, count in pairs if pair is not None),
            ),
            gather=tuple(
                self._collective(call, self._dtype.kept_in_training) for call in exchange.gathers
            ),
            num_updated=chunk.num_updated,
        )

    @property
    def _trainer(self) -> TrainerProfile:
        return self.keys.base.trainer.resolve()

    @property
    def _dtype(self) -> DType:
        return self.keys.base.dtype

    @property
    def _gradient_dtype(self) -> DType:
        return self._trainer.gradient_dtype or self._dtype.kept_in_training

    def write_updates(self, num_updated: Ints) -> tuple[tuple[Calls, ...], tuple[Calls, ...]]:
        """Return the checks and the update of a rank that updates as many parameters."""
        trainer, dtype = self._trainer, self._dtype
        checks = self._flat(lambda count: check_kernels(count, dtype, trainer), num_updated)
        return checks, self._flat(lambda count: update_kernels(count, dtype, trainer), num_updated)

    def _kernels(self, exchange: ChunkExchange) -> list[Calls]:
        """Return what runs next to the sums."""
        dtype, trainer, found = self._dtype, self._trainer, list[Calls]()
        for num_ranks in np.unique(exchange.num_ranks).tolist():
            some = np.where(exchange.num_ranks == num_ranks, exchange.num_gradients, 0)

            def write(count: int, num_ranks: int = num_ranks) -> Nodes:
                return sum_kernels(count, num_ranks, dtype, trainer)

            found += self._flat(write, some)
        shared = np.asarray(exchange.num_shared)
        return [*found, *self._flat(lambda n: reduction_kernels(n, dtype, trainer), shared)]

    def _over(self, pair: Pair, num_params: Ints) -> Calls:
        """Return a sum over two ranks of the pipeline."""
        groups = self._place(
            self.keys.stage_ranks[:, None], lambda stride: pair(at_stride(self.rank, *stride))
        )
        count = (num_params > 0).astype(np.int64)
        return self._add("all_reduce", num_params, groups, self._gradient_dtype, count)

    def _collective(self, call: StateCall, dtype: DType | None = None) -> Calls:
        """Return a collective, of gradients where no other format is given."""
        groups = self._place(
            np.stack((call.degree, call.stride), axis=1),
            lambda pair: PlacedGroup.of_rank(
                RankGroup(axis=call.axis, degree=pair[0], stride=pair[1]), self.rank
            ),
        )
        own = dtype or self._gradient_dtype
        return self._add(call.operator, call.elements, groups, own, call.count)

    def _place(
        self, pairs: Ints, place: Callable[[tuple[int, ...]], PlacedGroup]
    ) -> dict[str, Ints]:
        """Return the dimensions of groups, and who shares their links, each kind placed once."""
        first, inverse = number_rows(list(pairs.T))
        groups = [place(tuple(pair)) for pair in pairs[first].tolist()]
        columns = {
            name: np.array([group.dims[name] for group in groups])[inverse]
            for name in ("devices_per_node", "num_nodes")
        }
        columns["num_sharing"] = np.array([group.num_sharing for group in groups])[inverse]
        return columns

    def _add(
        self, operator: str, elements: Ints, groups: Mapping[str, Ints], dtype: DType, count: Ints
    ) -> Calls:
        numbers = np.zeros_like(elements)
        rows = np.flatnonzero(count)
        if len(rows):
            like = OperatorNode(
                role=operator,
                group="",
                section=Section.GRADIENT,
                operator=operator,
                dims={},
                dtype=dtype,
            )
            dims = {
                "message_bytes": dtype.bytes_of(elements[rows]) * groups["num_sharing"][rows],
                "devices_per_node": groups["devices_per_node"][rows],
                "num_nodes": groups["num_nodes"][rows],
            }
            numbers[rows] = self.book.add_columns(like, dims, len(rows))
        return Calls(numbers, count)

    def _flat(self, write: Callable[[int], Nodes], num_params: Ints) -> tuple[Calls, ...]:
        """Return kernels over as many parameters; their dimension is proportional to these."""
        rows = np.flatnonzero(num_params)
        found = []
        for node in write(1) if len(rows) else ():
            numbers = np.zeros_like(num_params)
            dims = {"num_params": num_params[rows] * node.dims["num_params"]}
            numbers[rows] = self.book.add_columns(node, dims, len(rows))
            found.append(Calls(numbers, (num_params > 0).astype(np.int64)))
        return tuple(found)
