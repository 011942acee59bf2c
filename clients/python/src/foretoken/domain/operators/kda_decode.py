"""Kimi delta attention for one new token per sequence, or the few that a draft proposes."""

from foretoken.domain.operators.spec.kda import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "kda_decode",
    "y = S^T q, S updated by the delta rule with a decay per key feature, for the next token",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
