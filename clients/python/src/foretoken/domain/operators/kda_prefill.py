"""Kimi delta attention over new tokens, in chunks; its projections are products of their own."""

from foretoken.domain.operators.spec.kda import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "kda_prefill",
    "y_t = S_t^T q_t, S by the delta rule with a decay per key feature, for new tokens",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
