"""Gradients in fp32, divided by the loss scale and the clipping factor, in place."""

from foretoken.domain.operators.spec.row import flat_operator

SPEC = flat_operator("unscale", "x *= factor", lambda _: 8.0)
