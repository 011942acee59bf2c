"""What kinds with a recurrent state and a short convolution before it have alike."""

from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, RequestState

CONV_KERNEL = KindDim("conv_kernel", "tokens that the convolution sees", 4, minimum=1)
STATE_BYTES = KindDim("state_bytes", "bytes of a number of the state", 4, minimum=1)
APPROXIMATED = (
    "a cached prefix is taken to have its state too, which engines keep at the ends"
    " of some blocks; the served gate of the output takes no time of its own"
)
BACKWARD = (
    "flash-linear-attention and mamba (their states computed again, three times the work of the"
    " scan); causal-conv1d"
)
WHOLE_SEQUENCES = "a recurrent state goes from one piece of a sequence to the next"
# A convolution keeps its last inputs in 16 bits.
_INPUT_BYTES = 2


def convolved_bytes(d: Dims, channels: int) -> int:
    """Return the bytes of a convolution's last inputs, of so many channels."""
    return channels * (d["conv_kernel"] - 1) * _INPUT_BYTES


def recurrent_state(d: Dims, num_elements: int, channels: int) -> RequestState:
    """Return what a layer keeps of a request: the state, and the convolution's last inputs.

    `num_elements` are the numbers of the state, `channels` those that are convolved, of one rank.
    """
    state = num_elements * d["state_bytes"]
    return RequestState(request_bytes=state + convolved_bytes(d, channels))
