"""Which layers of a model are alike: those that the same operators run in."""

from foretoken.domain.lowering.options import Nodes
from foretoken.simulator.training.memory.saved_tensor import layer_range


def layer_kinds(forward: Nodes, num_layers: int) -> tuple[int, ...]:
    """Return the number of each layer's kind, counted from 0, given the whole model's operators."""
    ranges = [layer_range(node) for node in forward]
    edges = {0, num_layers, *(end for item in ranges if item for end in (item[0], item[-1] + 1))}
    strides = {item.step for item in ranges if len(item) > 1}
    if edges == {0, num_layers} and strides <= {1}:
        return (0,) * num_layers
    kinds: dict[tuple[bool, ...], int] = {}
    return tuple(
        kinds.setdefault(tuple(layer in item for item in ranges), len(kinds))
        for layer in range(num_layers)
    )
