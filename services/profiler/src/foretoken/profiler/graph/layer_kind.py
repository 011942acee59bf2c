"""Which layers of a model are alike, by the shapes of what they hold."""

from collections import defaultdict

from torch import nn

from foretoken.profiler.graph.module_fold import layer_in_path


def layer_kinds(model: nn.Module) -> tuple[object, ...]:
    """Return for each layer what tells its kind from others: its modules and their weights."""
    found: dict[int, list[object]] = defaultdict(list)
    for path, module in model.named_modules():
        layer, inner = layer_in_path(path)
        if layer >= 0:
            kind = getattr(module, "layer_type", None) or getattr(module, "sliding_window", None)
            found[layer].append((inner, type(module).__name__, kind))
    for path, parameter in model.named_parameters():
        layer, inner = layer_in_path(path)
        if layer >= 0:
            found[layer].append((inner, tuple(parameter.shape)))
    return tuple(tuple(found[layer]) for layer in sorted(found))
