"""Norm of gradients in fp32, or the check that they are finite: one read."""

from foretoken.domain.operators.spec.row import flat_operator

SPEC = flat_operator("gradient_norm", "sum of squares", lambda _: 4.0, num_flops=2)
