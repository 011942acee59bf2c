"""Sum of a micro batch's weight gradient and those before it, by a kernel of its own."""

from foretoken.domain.operators.spec.row import flat_operator

SPEC = flat_operator(
    "gradient_accumulation",
    "total += gradient, in its own number format",
    lambda element_bytes: 3 * element_bytes,
)
