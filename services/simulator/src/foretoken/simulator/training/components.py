"""The parts of a step under the names that measured training steps have for them."""

from collections.abc import Iterator
from dataclasses import dataclass

from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.results.training_report import ComponentTime
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.steps.program import Duration
from foretoken.simulator.steps.stage_operators import ChunkOperators
from foretoken.simulator.training.accounting import value
from foretoken.simulator.training.chunk_timing import TimedChunk
from foretoken.simulator.training.composition import ComposedStep, StepComposition


def list_components(
    composition: StepComposition, composed: ComposedStep
) -> tuple[ComponentTime, ...]:
    """Return the components of every rank of the pipeline, each where it has one."""
    num_ranks = len(composition.rules.orders)
    return tuple(
        ComponentTime(
            name=part.name,
            stage=rank,
            time_ms=part.time_us * value(composed.factor) / US_PER_MS,
            num_calls=part.num_calls,
        )
        for rank in range(num_ranks)
        for part in _Stage(composition, composed, rank).parts()
        if part.num_calls and part.time_us > 0
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The mean time of `num_calls` occurrences."""

    name: str
    time_us: float
    num_calls: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A chunk of a rank, which runs it for `num_runs` micro batches."""

    chunk: ChunkOperators
    passes: TimedChunk
    num_runs: int
    duration: Duration

    def time_us(self, node: OperatorNode) -> float:
        """Return the time of one repetition."""
        return value(self.duration(node))

    def outside_us(self) -> float:
        """Return what a forward pass does outside of the module."""
        loss = [node for node in self.chunk.forward if node.role.startswith("loss")]
        outside = (*self.chunk.receives_input, *loss)
        return sum(self.time_us(node) * node.repeat for node in outside)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One rank of the pipeline with its chunks."""

    composition: StepComposition
    composed: ComposedStep
    rank: int

    @property
    def _held(self) -> list[_Held]:
        """The chunks of the rank."""
        operators, counts = self.composition.operators, self.composition.pass_counts[self.rank]
        held = []
        for index in operators.chunks_of_rank[self.rank]:
            count = counts["forward", index]
            # Of two ranks that hold a chunk, the first one is timed.
            duration = self.composed.timing.duration(operators.rank_of_chunk(index), count)
            passes = self.composed.passes[index]
            held.append(_Held(operators.chunks[index], passes, count, duration))
        return held

    def parts(self) -> Iterator[_Part]:
        yield from self._passes()
        yield from self._communication()
        end = self.composed.end.ranks[self.rank]
        yield _Part("dp_allreduce", value(end.work.reduction_us), 1)
        yield _Part("dp_allgather", value(end.work.gather_us), 1)
        yield _Part("optimizer", value(end.after_start_us), 1)
        yield _Part("update", value(end.work.update_us), 1)

    def _passes(self) -> Iterator[_Part]:
        held = self._held
        num_runs = max((item.num_runs for item in held), default=0)
        num_layers = sum(item.chunk.rank.num_stage_layers for item in held)
        for name, kind in (("fwd", "forward"), ("bwd", "backward")):
            times = [item.passes.of_kind(kind) for item in held]
            layers_us = sum(value(time.layers_us) for time in times)
            yield _Part(f"encoder_{name}", layers_us / max(1, num_layers), num_runs * num_layers)
            total_us = sum(value(time.total_us) for time in times)
            if kind == "forward":
                # What is measured is the module alone, without the loss and its input's gather.
                total_us -= sum(item.outside_us() for item in held)
            yield _Part(f"stage_{name}", total_us, num_runs)

    def _communication(self) -> Iterator[_Part]:
        held = self._held
        reductions = [
            (item.time_us(node), node.repeat * item.num_runs)
            for item in held
            for node in (*item.chunk.forward, *item.chunk.backward, *item.chunk.plan.recomputed)
            if node.axis == "tp"
            and node.section is Section.LAYER
            and node.operator in ("all_reduce", "reduce_scatter")
        ]
        sends = [(value(item.passes.send_us), item.num_runs) for item in held if item.chunk.sends]
        for name, calls in (("mp_allreduce", reductions), ("pp_p2p", sends)):
            num_calls = sum(count for _, count in calls)
            total_us = sum(time_us * count for time_us, count in calls)
            yield _Part(name, total_us / max(1, num_calls), num_calls)
