"""The whole latent attention block for one new token per sequence, projections included."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_decode import (
    BATCH_DIMS,
    BATCH_FEATURES,
    BATCH_RELATIONS,
    decode_dims,
    ragged_decodes,
)
from foretoken.domain.operators.spec.mla_module import (
    FULL_WIDTHS,
    LAUNCHES_OF_MLA,
    MODULE_DIMS,
    QUICK_WIDTHS,
    module_bytes,
    token_weights,
    unpacking_weights,
)
from foretoken.domain.operators.spec.operator import Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    latent_dim = 2 * d["kv_lora_rank"] + d["qk_rope_head_dim"]
    attention = d["kv_tokens"] * d["num_heads"] * latent_dim
    # Queries go to the latent space and values come back by the weights that unpack the cache.
    projections = d["num_seqs"] * (token_weights(d) + unpacking_weights(d))
    return 2 * (attention + projections)


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    widths = QUICK_WIDTHS if quick else FULL_WIDTHS
    for num_heads in pick(quick, (8,), (16, 128)):
        for num_seqs in pick(quick, (1, 8), powers_of_two(1, 512)):
            for kv_len in pick(quick, (32, 256, 1024), powers_of_two(64, 32768)):
                yield {**decode_dims(num_seqs, kv_len), "num_heads": num_heads, **widths}
    for dims in ragged_decodes(quick):
        yield {**dims, "num_heads": 8 if quick else 128, **widths}


SPEC = OperatorSpec(
    name="mla_decode_module",
    summary="latent attention block of one token per sequence, from hidden state to hidden state",
    group="attention",
    dims=(
        *BATCH_DIMS,
        *MODULE_DIMS,
    ),
    flops=_flops,
    moved_bytes=lambda d, element_bytes: module_bytes(d, d["num_seqs"], element_bytes),
    features={
        "row_block_waves": lambda d, num_sms: ceil_divide(d["num_seqs"], 64) / num_sms,
        **BATCH_FEATURES,
    },
    relations=BATCH_RELATIONS,
    sweep=_sweep,
    num_weights=lambda d: token_weights(d) + unpacking_weights(d),
    num_launches=LAUNCHES_OF_MLA,
)
