"""The whole latent attention block for new tokens: projections, attention, output projection."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_prefill import (
    BATCH_DIMS,
    BATCH_RELATIONS,
    prefill_dims,
    unequal_prefill_dims,
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
    head_dim = d["qk_nope_head_dim"] + d["qk_rope_head_dim"] + d["v_head_dim"]
    attention = d["score_pairs"] * d["num_heads"] * head_dim
    projections = d["q_tokens"] * token_weights(d) + d["kv_tokens"] * unpacking_weights(d)
    return 2 * (attention + projections)


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    widths = QUICK_WIDTHS if quick else FULL_WIDTHS
    for num_heads in pick(quick, (8,), (16, 128)):
        for num_seqs in (1, 4):
            for q_len in pick(quick, (16, 64, 256), powers_of_two(16, 16384)):
                yield {**prefill_dims(num_seqs, q_len, 0), "num_heads": num_heads, **widths}
    for q_len in pick(quick, (64,), (64, 512, 2048)):
        yield {**unequal_prefill_dims(4, q_len, 0), "num_heads": 8 if quick else 16, **widths}


SPEC = OperatorSpec(
    name="mla_prefill_module",
    summary="latent attention block of new tokens, from hidden state to hidden state",
    group="attention",
    dims=(
        *BATCH_DIMS,
        *MODULE_DIMS,
    ),
    flops=_flops,
    moved_bytes=lambda d, element_bytes: module_bytes(d, d["q_tokens"], element_bytes),
    features={
        "row_block_waves": lambda d, num_sms: ceil_divide(d["q_tokens"], 128) / num_sms,
        "q_len_mean": lambda d, _: d["q_tokens"] / d["num_seqs"],
        "pairs_per_query": lambda d, _: d["score_pairs"] / d["q_tokens"],
    },
    relations=BATCH_RELATIONS,
    sweep=_sweep,
    num_weights=lambda d: token_weights(d) + unpacking_weights(d),
    num_launches=LAUNCHES_OF_MLA,
)
