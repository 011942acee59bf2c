"""The gated delta rule over new tokens, in chunks; its projections are products of their own."""

from foretoken.domain.operators.spec.gated_delta import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "gated_delta_prefill",
    "y_t = S_t^T q_t, S by the gated delta rule, for the tokens of each sequence",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
