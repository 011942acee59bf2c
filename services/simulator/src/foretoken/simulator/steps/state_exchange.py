"""What the states of a chunk exchange once a step: which sums and gathers, of how many values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.domain.units import Quantity
from foretoken.simulator.steps.parameters import ChunkParameters
from foretoken.simulator.steps.sharding import Degrees
from foretoken.simulator.steps.state_sums import StateCall, StateRule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkExchange:
    """The collectives of one chunk, of numbers or columns of cases.

    `buckets` are sums of gradients that may overlap the last backward pass, `norms` is the sum over
    tp of gradients that each rank has a part of, `gathers` follow the update. Kernels run on
    `num_gradients`, which `num_ranks` samples or parts of them are summed over, and on the
    `num_shared` of them that other ranks have too.
    """

    buckets: Sequence[StateCall]
    norms: StateCall
    gathers: Sequence[StateCall]
    num_gradients: Quantity
    num_shared: Quantity
    num_ranks: Quantity

    @classmethod
    def of_chunk(cls, chunk: ChunkParameters, degrees: Degrees) -> "ChunkExchange":
        """Return what a chunk exchanges in layouts of these degrees."""
        trainer = degrees.base.trainer.resolve()
        rule = StateRule(trainer=trainer, stage=degrees.state_stage, is_once=degrees.is_once)
        has_parts = (degrees.tp > 1) & (degrees.is_isp ^ True)
        norms, held = chunk.norms * has_parts, chunk.groups.items()
        sizes = [(group.num_params, group.ranks.num_ranks > 1) for group in chunk.groups.values()]
        return cls(
            buckets=[
                replace(call, role=f"{name}_gradient_{call.operator}")
                for name, group in held
                for call in rule.sum_gradients(group)
            ],
            norms=StateCall(
                role="norm_gradient_all_reduce",
                operator="all_reduce",
                elements=norms,
                count=1 * (norms > 0),
                axis="tp",
                degree=degrees.tp,
                stride=1 + 0 * degrees.tp,
            ),
            gathers=[
                replace(rule.gather_parameters(group), role=f"{name}_parameter_all_gather")
                for name, group in held
            ],
            num_gradients=sum(count for count, _ in sizes),
            num_shared=sum(count * is_shared for count, is_shared in sizes),
            num_ranks=degrees.dp * degrees.cp,
        )
