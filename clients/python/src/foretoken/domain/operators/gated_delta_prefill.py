"""The gated delta rule over new tokens, in chunks; its projections are products of their own."""

from dataclasses import replace

from foretoken.domain.operators.spec.gated_delta import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

# Decay and strength of a token; queries, keys and values put in a row each, the norms of the first
# two; of chunks the decays' sums, keys times keys, two that invert these, the pairs' forms, the
# states, zeroes and the outputs. Source: SGLang 0.5.9, layers/attention/
# hybrid_linear_attn_backend.py (GDNAttnBackend.forward_extend) and fla/chunk.py.
_LAUNCHES = 14

SPEC = replace(
    recurrent_operator(
        "gated_delta_prefill",
        "y_t = S_t^T q_t, S by the gated delta rule, for the tokens of each sequence",
        sizes=SIZES,
        work=WORK,
        swept=SWEPT,
    ),
    num_launches=_LAUNCHES,
)
