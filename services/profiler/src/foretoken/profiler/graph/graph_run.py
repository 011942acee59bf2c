"""Run a traced graph once, and keep the integers that its calls are given."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from foretoken.profiler.graph.trace import Trace

# By the name of a node: the values of its tensors that are no real numbers, in order.
IntegerInputs = Mapping[str, tuple[torch.Tensor, ...]]


def find_integers(trace: Trace, token_ids: torch.Tensor) -> IntegerInputs:
    """Return the integer and boolean tensors that each different call is given.

    Random ones could be rows that a table does not have. Real numbers are drawn, not kept.

    Raises:
        torch.OutOfMemoryError: the forward pass does not fit.

    """
    wanted: dict[object, str] = {}
    for call in trace.calls:
        if any(not shape.dtype.is_floating_point for shape in call.inputs):
            wanted.setdefault(call.key, call.name)
    run = _KeepingRun(trace.module, frozenset(wanted.values()))
    with torch.no_grad():
        run.run(token_ids)
    return run.found


class _KeepingRun(fx.Interpreter):  # type: ignore[misc] # torch's types are not read
    """Interprets the graph and notes the integer inputs of some nodes."""

    def __init__(self, module: fx.GraphModule, wanted: frozenset[str]) -> None:
        super().__init__(module)
        self._wanted = wanted
        self.found: dict[str, tuple[torch.Tensor, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_module" and str(n.target).startswith("_guards"):
            # Checks of the arguments that tracing adds.
            return None
        if n.name in self._wanted:
            values = _pytree.tree_leaves(self.fetch_args_kwargs_from_env(n))
            self.found[n.name] = tuple(
                value.clone()
                for value in values
                if isinstance(value, torch.Tensor) and not value.is_floating_point()
            )
        return super().run_node(n)
