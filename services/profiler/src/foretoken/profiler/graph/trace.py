"""Trace the forward pass of a model into the calls it makes, each with what it is given."""

import contextlib
import logging
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree

# Checks that tracing adds, and taking a result out of several.
_NO_WORK = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range")


class TraceError(Exception):
    """The model cannot be traced; the message is the tracer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShape:
    """A tensor of a traced call: all that its time depends on.

    `is_weight` tells parameters from activations, `name` is what of the trace makes it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_weight: bool = False
    name: str = ""

    @property
    def num_elements(self) -> int:
        """Elements of storage that the tensor spans."""
        if 0 in self.shape:
            return 0
        spans = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in spans)

    @property
    def num_bytes(self) -> int:
        """Bytes of storage that the tensor spans."""
        return int(self.num_elements * self.dtype.itemsize)

    @property
    def key(self) -> tuple[object, ...]:
        """What makes calls alike."""
        return (self.shape, self.stride, self.dtype, self.requires_grad, self.is_weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCall:
    """One call of the graph.

    `arguments` are positional and named ones, nested, with `TensorShape` in place of tensors.
    `module` is the path of the module that makes the call, `outputs` what it returns. Where
    `num_readers` calls use its result on the way to a gradient, one less sums of gradients follow
    backward.
    """

    name: str
    target: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    outputs: tuple[TensorShape, ...]
    module: str
    num_readers: int = 0

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """The tensors it is given."""
        return tuple(leaf for leaf in flatten(self.arguments) if isinstance(leaf, TensorShape))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for calls that take the same time."""
        leaves, layout = _pytree.tree_flatten(self.arguments, is_leaf=_is_shape)
        facts = [leaf.key if isinstance(leaf, TensorShape) else repr(leaf) for leaf in leaves]
        return (str(self.target), str(layout), *facts)

    @property
    def is_differentiable(self) -> bool:
        """Whether a gradient goes back through it."""
        return any(output.requires_grad for output in self.outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The calls of a forward pass in order; `module` runs them again."""

    calls: tuple[TracedCall, ...]
    module: fx.GraphModule
    output_names: frozenset[str] = field(default_factory=frozenset)


def flatten(arguments: Any) -> list[Any]:
    """Return the leaves of nested arguments; a tensor's description is one."""
    leaves: list[Any] = _pytree.tree_leaves(arguments, is_leaf=_is_shape)
    return leaves


def trace_model(model: nn.Module, token_ids: torch.Tensor) -> Trace:
    """Trace the forward pass of a model for these tokens.

    Raises:
        TraceError: torch.export cannot follow it.

    """
    try:
        with torch.no_grad(), _quiet():
            exported = torch.export.export(model, (), {"input_ids": token_ids}, strict=False)
    except torch.OutOfMemoryError:
        raise
    # The tracer raises what the model's own code raises, which can be anything.
    except Exception as err:
        reason = next((line for line in str(err).splitlines() if line.strip()), repr(err))
        raise TraceError(f"torch.export: {type(err).__name__}: {reason}") from err
    module = exported.module()
    return Trace(
        calls=tuple(_read_calls(module)),
        module=module,
        output_names=frozenset(node.name for node in _output_nodes(module)),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # It logs what it raises as well.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


def _read_calls(module: fx.GraphModule) -> Iterator[TracedCall]:
    needs_grad = _find_differentiable(module)
    readers = Counter(
        source.name
        for node in module.graph.nodes
        if node.name in needs_grad and not _is_no_work(node)
        for source in node.all_input_nodes
        if source.name in needs_grad
    )
    weights = {node.name for node in module.graph.nodes if node.op == "get_attr"}

    def describe(node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        return _shape_of(
            value, node.name, needs_grad=node.name in needs_grad, is_weight=node.name in weights
        )

    for node in module.graph.nodes:
        if node.op != "call_function" or _is_no_work(node):
            continue
        yield TracedCall(
            name=node.name,
            target=node.target,
            arguments=fx.map_arg((node.args, node.kwargs), describe),
            outputs=tuple(_outputs(node, is_differentiable=node.name in needs_grad)),
            module=_module_path(node),
            num_readers=readers[node.name],
        )


def _find_differentiable(module: fx.GraphModule) -> frozenset[str]:
    """Return the names of nodes that depend on a parameter by arithmetic on real numbers."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: set[str] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            if str(node.target) in parameters:
                found.add(node.name)
        elif node.op == "call_function" and any(
            source.name in found for source in node.all_input_nodes
        ):
            values = _pytree.tree_leaves(node.meta.get("val"))
            if any(isinstance(val, torch.Tensor) and val.is_floating_point() for val in values):
                found.add(node.name)
    return frozenset(found)


def _outputs(node: fx.Node, *, is_differentiable: bool) -> Iterator[TensorShape]:
    for value in _pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            needs_grad = is_differentiable and value.is_floating_point()
            yield _shape_of(value, node.name, needs_grad=needs_grad, is_weight=False)


def _shape_of(value: torch.Tensor, name: str, *, needs_grad: bool, is_weight: bool) -> TensorShape:
    return TensorShape(
        shape=tuple(int(size) for size in value.shape),
        stride=tuple(int(step) for step in value.stride()),
        dtype=value.dtype,
        requires_grad=needs_grad,
        is_weight=is_weight,
        name=name,
    )


def _module_path(node: fx.Node) -> str:
    """Return the path of the innermost module around a node, empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def _is_no_work(node: fx.Node) -> bool:
    return node.target is operator.getitem or any(name in str(node.target) for name in _NO_WORK)


def _output_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "output":
            yield from node.all_input_nodes


def _is_shape(leaf: object) -> bool:
    return isinstance(leaf, TensorShape)


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
