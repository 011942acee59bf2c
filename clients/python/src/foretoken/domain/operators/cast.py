"""Values between a 16-bit format and fp32."""

from foretoken.domain.operators.spec.row import flat_operator

SPEC = flat_operator(
    "cast", "y = x in fp32, or back", lambda element_bytes: element_bytes + 4, num_flops=0
)
