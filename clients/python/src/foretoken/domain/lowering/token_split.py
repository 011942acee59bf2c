"""Which tokens of a micro batch a rank has.

Context parallelism gives each rank two pieces of every sequence, one from its first and one from
its second half, so that all have as much causal attention: what a rank sees of itself is a causal
sequence of its own tokens. InternEvo's `isp` splits tokens over the ranks of tp the same way.
Source: Megatron-Core, `get_batch_on_this_cp_rank`.
"""

import dataclasses

from foretoken.domain.lowering.graph import BatchShape, PrefillShape, RankContext
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.operators.attention_prefill import prefill_dims


def token_degree(rank: RankContext, options: LoweringOptions) -> int:
    """Return over how many ranks every operator sees its tokens split."""
    training = options.training
    if training is None:
        return 1
    splits_by_tp = training.weight_parallel == "isp"
    return rank.layout.cp * (rank.layout.tp if splits_by_tp else 1)


def local_shape(shape: BatchShape, rank: RankContext, options: LoweringOptions) -> BatchShape:
    """Return the part of a micro batch that a rank has; serving batches are not split."""
    degree = token_degree(rank, options)
    if degree == 1:
        return shape
    prefill = shape.prefill
    if prefill is not None:
        length = prefill.q_tokens // prefill.num_seqs // degree
        prefill = PrefillShape(**prefill_dims(prefill.num_seqs, length, 0))
    return dataclasses.replace(
        shape,
        num_tokens=shape.num_tokens // degree,
        num_output_rows=shape.num_output_rows // degree,
        prefill=prefill,
    )
