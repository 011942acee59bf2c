"""The gated delta rule for one new token per sequence, or the few that a draft proposes."""

from foretoken.domain.operators.spec.gated_delta import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "gated_delta_decode",
    "y = S^T q, S updated by the gated delta rule, for the next token of each sequence",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
