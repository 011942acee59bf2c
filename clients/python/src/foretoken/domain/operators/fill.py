"""Zeros written to a buffer of gradients."""

from foretoken.domain.operators.spec.row import flat_operator

SPEC = flat_operator("fill", "x = 0", lambda element_bytes: element_bytes, num_flops=0)
