"""The memory a case takes, estimated before it is tried: a full device slows all after it."""

from foretoken.domain.measurements.estimate import OperatorCall, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import least_element_bytes

# A backward call holds its inputs, their gradients and what the forward pass saved.
_BACKWARD_MEMORY_RATIO = 3.0


def needed_bytes(call: OperatorCall) -> float:
    """Return about how many bytes the tensors of a call take."""
    spec = find_operator(call.operator)
    element_bytes = least_element_bytes(call.dtype, call.variant)
    needed = float(spec.moved_bytes(call.dims, element_bytes))
    needed += float(spec.num_weights(call.dims)) * element_bytes
    return needed * _BACKWARD_MEMORY_RATIO if call.phase is Phase.BACKWARD else needed
