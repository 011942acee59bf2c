"""Send a tensor from one rank to another, as pipeline stages do."""

from foretoken.domain.collective import collective_dims, collective_features, sweep_pairs
from foretoken.domain.operator import OperatorSpec

SPEC = OperatorSpec(
    name="send_recv",
    summary="point-to-point copy: two devices of one node, or one device on each of two nodes",
    dims=collective_dims("bytes sent"),
    flops=lambda d, _: 0 * d["message_bytes"],
    moved_bytes=lambda d, _: 1.0 * d["message_bytes"],
    features=collective_features(),
    sweep=sweep_pairs,
    is_collective=True,
)
