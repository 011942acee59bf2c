"""The work a model needs by itself, which its utilisation counts."""

from foretoken.domain.lowering.options import Nodes
from foretoken.domain.operators.spec.operator import find_operator

# Groups of operators whose FLOPs are the model's own work; the rest is bandwidth.
_GROUPS = ("gemm", "moe", "attention")


def count_model_flops(nodes: Nodes) -> float:
    """Return the FLOPs of the operators that are the model's own work."""
    return float(
        sum(
            find_operator(node.operator).flops(node.dims, node.dtype.num_bytes) * node.repeat
            for node in nodes
            if find_operator(node.operator).group in _GROUPS
        )
    )
