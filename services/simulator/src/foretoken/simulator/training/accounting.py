"""Where the time of a step goes: by operator group, by axis, by what the figures rest on."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode, Overlap
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.steps.pipelines.schedule import pair_key
from foretoken.simulator.steps.program import Column, CommunicationKey, PassNodes
from foretoken.simulator.steps.stage_operators import ChunkOperators, StepOperators
from foretoken.simulator.training.composition import ComposedStep, StepComposition
from foretoken.simulator.training.operator_prices import OperatorPrices
from foretoken.simulator.training.variability import ESTIMATE


@dataclass(slots=True)
class RankAccount:
    """What a rank of the pipeline is busy with during a step, in µs.

    `by_group` is computation and what communication it waits for. `by_provenance` counts every
    operator, hidden or not.
    """

    by_group: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_provenance: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    communication_by_axis: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )
    exposed_by_axis: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def busy_us(self) -> float:
        """Time the rank computes or communicates; the rest of the step it waits."""
        return sum(self.by_group.values())

    def add(self, node: OperatorNode, time_us: float, provenance: str) -> None:
        """Add an operator that the rank is busy with."""
        if _is_collective(node):
            self.hide(node, time_us, provenance)
            self.expose((node.group, node.axis), time_us)
            return
        self.by_group[node.group] += time_us
        self.by_provenance[provenance] += time_us

    def hide(self, node: OperatorNode, time_us: float, provenance: str) -> None:
        """Add communication, which may be hidden."""
        self.communication_by_axis[node.axis] += time_us
        self.by_provenance[provenance] += time_us

    def expose(self, key: CommunicationKey, time_us: float) -> None:
        """Add communication that is waited for."""
        group, axis = key
        self.by_group[group] += time_us
        self.exposed_by_axis[axis] += time_us


def account_ranks(composition: StepComposition, composed: ComposedStep) -> list[RankAccount]:
    """Return the account of every rank of the pipeline, at the estimate."""
    num_ranks = len(composition.rules.orders)
    return [_Rank(composition, composed, rank).account() for rank in range(num_ranks)]


def sum_by_provenance(
    operators: StepOperators,
    prices: OperatorPrices,
    rank: int,
    pass_counts: Mapping[tuple[str, int], int],
) -> Mapping[str, float]:
    """Return the µs of all operators of a rank of the pipeline in a step by what they rest on.

    Every operator counts, hidden or not, at its estimate; what the pipeline sends does not.
    """
    held = [operators.chunks[index] for index in operators.chunks_of_rank[rank]]
    once = [node for chunk in held for node in (*chunk.states.reduction, *chunk.states.gather)]
    runs = [((*once, *operators.checks[rank], *operators.updates[rank]), 1)]
    runs += [
        (tuple(pass_nodes(operators.chunks[index], kind).nodes), count)
        for (kind, index), count in pass_counts.items()
    ]
    own, found = prices.of_stage(rank), defaultdict[str, float](float)
    for nodes, count in runs:
        for node in nodes:
            price = own.find(node)
            found[price.provenance.name.lower()] += price.latency_us * node.repeat * count
    return found


def value(column: Column | float) -> float:
    """Return the estimate of a column."""
    return float(np.ravel(column)[ESTIMATE])


@dataclass(frozen=True, slots=True)
class _Rank:
    composition: StepComposition
    composed: ComposedStep
    rank: int

    def account(self) -> RankAccount:
        account = RankAccount()
        for (kind, index), count in self.composition.pass_counts[self.rank].items():
            self._add_pass(account, kind, index, count)
        self._add_ends_of_backward(account)
        self._hide_in_pairs(account)
        self._add_transfers(account)
        self._add_end(account)
        return account

    def _add_ends_of_backward(self, account: RankAccount) -> None:
        """Add what the first and the last backward passes take less or more than the others."""
        for index in self.composition.operators.chunks_of_rank[self.rank]:
            passes = self.composed.passes[index]
            account.by_group["gradient_accumulation"] -= value(passes.not_accumulated_us)
            slowdown_us = value(passes.reduction_slowdown_us)
            _add(account.by_group, "overlap_slowdown", slowdown_us, 0.0)
        if account.by_group["gradient_accumulation"] <= 0:
            del account.by_group["gradient_accumulation"]

    def _hide_in_pairs(self, account: RankAccount) -> None:
        """Take away the communication that passes of one slot hide from each other."""
        hidden_us = 0.0
        exposed: defaultdict[CommunicationKey, float] = defaultdict(float)
        for slot in self.composition.rules.orders[self.rank]:
            pair = pair_key(slot)
            if pair is None:
                continue
            times = [self.composed.passes[item.chunk].of_kind(item.kind) for item in slot]
            together_us = value(self.composed.pairs_us[pair])
            hidden_us += sum(value(time.total_us) for time in times) - together_us
            for time in times:
                for key, column in time.exposed_us.items():
                    exposed[key] += value(column)
        hidden_ratio = min(1.0, hidden_us / (sum(exposed.values()) or 1))
        for key, time_us in exposed.items():
            account.expose(key, -time_us * hidden_ratio)

    def _add_pass(self, account: RankAccount, kind: str, index: int, count: int) -> None:
        operators = self.composition.operators
        nodes = pass_nodes(operators.chunks[index], kind)
        time = self.composed.passes[index].of_kind(kind)
        # Of two ranks that hold a chunk, the first one is timed.
        duration = self.composed.timing.duration(operators.rank_of_chunk(index), count)
        computed = 0.0
        for node in nodes.nodes:
            time_us = value(duration(node)) * node.repeat * count
            if _is_collective(node):
                account.hide(node, time_us, self._provenance(node))
            else:
                account.add(node, time_us, self._provenance(node))
                computed += time_us
        gap_us = value(time.compute_us) * count - computed
        _add(account.by_group, "host", gap_us, computed)
        _add(account.by_group, "overlap_slowdown", value(time.slowdown_us) * count, computed)
        for key, exposed in time.exposed_us.items():
            account.expose(key, value(exposed) * count)

    def _add_transfers(self, account: RankAccount) -> None:
        exposed_us = value(self.composed.run.transfers_us[self.rank])
        if exposed_us <= 0:
            return
        operators = self.composition.operators
        rank, sends = next(
            (operators.rank_of_chunk(index), chunk.sends)
            for index, chunk in enumerate(operators.chunks)
            if chunk.sends
        )
        account.expose(("stage_transfer", "pp"), exposed_us)
        account.by_provenance[self._provenance(sends[0], rank)] += exposed_us
        counts = self.composition.pass_counts[self.rank]
        for (kind, index), count in counts.items():
            if kind != "backward_weight":
                # What a pass needs, and what it makes: across one boundary each.
                across = self.composed.passes[max(0, index - 1) : index + 1]
                is_forward = kind == "forward"
                send_us = sum(
                    value(passes.send_us if is_forward else passes.send_back_us)
                    for passes in across
                )
                account.communication_by_axis["pp"] += send_us * count

    def _add_end(self, account: RankAccount) -> None:
        operators, end = self.composition.operators, self.composed.end
        own = end.ranks[self.rank]
        held = [operators.chunks[index] for index in operators.chunks_of_rank[self.rank]]
        reduction = [node for chunk in held for node in chunk.states.reduction]
        gathers = [node for chunk in held for node in chunk.states.gather]
        self._add_exchange(account, reduction, value(own.exposed_reduction_us))
        updates = value(self.composed.timing.columns.updates)
        if updates:
            self._add_exchange(account, gathers, value(own.exposed_gather_us))
        for node, time_us in self._times(operators.checks[self.rank]):
            account.add(node, time_us, self._provenance(node))
        for node, time_us in self._times(operators.updates[self.rank]):
            account.add(node, time_us * updates, self._provenance(node))
        _add(account.by_group, "host", value(end.gap_us), 0.0)

    def _add_exchange(
        self, account: RankAccount, nodes: Sequence[OperatorNode], busy_us: float
    ) -> None:
        """Add what states exchange and the rank is busy with for `busy_us`, kernels included."""
        times = list(self._times(nodes))
        carried_us = sum(time_us for node, time_us in times if _is_collective(node))
        computed_us = sum(time_us for node, time_us in times if not _is_collective(node))
        waited_us = busy_us - computed_us
        exposed_ratio = min(1.0, waited_us / (carried_us or 1))
        self._add_left(account, waited_us - carried_us)
        for node, time_us in times:
            if _is_collective(node):
                account.hide(node, time_us, self._provenance(node))
                account.expose((node.group, node.axis), time_us * exposed_ratio)
            else:
                account.add(node, time_us, self._provenance(node))

    def _add_left(self, account: RankAccount, left_us: float) -> None:
        """Add the wait for what passes have left to the end of the step."""
        deferred: defaultdict[CommunicationKey, float] = defaultdict(float)
        for (kind, index), count in self.composition.pass_counts[self.rank].items():
            for node, time_us in self._times(
                [
                    node
                    for node in pass_nodes(self.composition.operators.chunks[index], kind).nodes
                    if node.overlap is Overlap.DEFERRED
                ]
            ):
                deferred[node.group, node.axis] += time_us * count
        total_us = sum(deferred.values())
        for key, time_us in deferred.items():
            account.expose(key, max(0.0, left_us) * time_us / total_us)

    def _times(self, nodes: Sequence[OperatorNode]) -> Iterator[tuple[OperatorNode, float]]:
        """Yield what runs once a step, with its time."""
        duration = self.composed.timing.duration(self.rank)
        for node in nodes:
            yield node, value(duration(node)) * node.repeat

    def _provenance(self, node: OperatorNode, rank: int | None = None) -> str:
        prices = self.composition.prices.of_stage(self.rank if rank is None else rank)
        return prices.find(node).provenance.name.lower()


def _is_collective(node: OperatorNode) -> bool:
    return find_operator(node.operator).is_collective


def pass_nodes(chunk: ChunkOperators, kind: str) -> PassNodes:
    """Return the operators of a pass by its kind in a schedule."""
    if kind == "forward":
        return chunk.forward_pass
    return chunk.backward_pass(kind.removeprefix("backward").removeprefix("_") or "both")


def _add(totals: dict[str, float], name: str, time_us: float, beside_us: float) -> None:
    # What is the difference of two sums of many floats is nothing where it is a rounding error.
    if time_us > 1e-9 * beside_us:
        totals[name] = totals.get(name, 0.0) + time_us


def in_ms(times_us: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return times in ms, the longest first."""
    scaled = {name: time_us * factor / 1e3 for name, time_us in times_us.items()}
    return dict(sorted(scaled.items(), key=lambda item: -item[1]))
