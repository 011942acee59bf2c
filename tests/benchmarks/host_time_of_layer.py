"""Host time of a checkpointed GPT layer in eager PyTorch: the source of `launch_us` in profiles.

Run: python tests/benchmarks/host_time_of_layer.py (needs PyTorch, the extra `profiler`)

The layer is written as Megatron-LM writes it: unfused attention, dropout inside a forked random
state, autograd functions around what tensor parallelism adds, gradients added up from hooks. Its
tensors have a few elements, so that all that is left is Python, dispatch and autograd. Prints the
least processor time of a layer's three passes, and of one of the operators that Foretoken counts
in it, and how many kernels a device would be sent by them.
"""

import math
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

_HIDDEN, _HEADS, _LENGTH, _LAYERS, _RUNS = 16, 2, 4, 24, 20
# Of a layer's forward, recomputed and backward pass, without tensor parallelism.
_NUM_OPERATORS = 56
_US_PER_S = 1e6
# Operators of PyTorch that look at a tensor in another way, or allocate one.
_NO_KERNELS = (
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "split", "detach", "alias"),
    *("slice", "select", "unsqueeze", "squeeze", "empty", "empty_like", "lift_fresh"),
)


class _Reduce(torch.autograd.Function):
    """Stands for a collective of either pass: one call."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:  # type: ignore[override]
        return values.mul(1.0)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.mul(1.0)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        shares = torch.softmax(scores, -1)
        ctx.save_for_backward(shares, torch.tensor([scale]))
        return shares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        shares, _ = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, shares, -1, shares.dtype), None


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(values, bias)
        return functional.gelu(values + bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        values, bias = ctx.saved_tensors
        passed = torch.ops.aten.gelu_backward(gradient, values + bias)
        return passed, passed.sum((0, 1))


def _fork_random_state() -> None:
    torch.set_rng_state(torch.get_rng_state())


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(_HIDDEN), nn.LayerNorm(_HIDDEN)])
        self.qkv = nn.Linear(_HIDDEN, 3 * _HIDDEN)
        self.out = nn.Linear(_HIDDEN, _HIDDEN, bias=False)
        self.up = nn.Linear(_HIDDEN, 4 * _HIDDEN, bias=False)
        self.down = nn.Linear(4 * _HIDDEN, _HIDDEN, bias=False)
        self.biases = nn.ParameterList(
            [torch.zeros(_HIDDEN), torch.zeros(4 * _HIDDEN), torch.zeros(_HIDDEN)]
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        attended = self._attend(self.norms[0](hidden))
        hidden = _join(attended, self.biases[0], hidden)
        wide = self.up(_Reduce.apply(self.norms[1](hidden)))
        wide = _BiasGelu.apply(wide, self.biases[1])
        return _join(_Reduce.apply(self.down(wide)), self.biases[2], hidden)

    def _attend(self, hidden: Tensor) -> Tensor:
        mixed = self.qkv(_Reduce.apply(hidden))
        mixed = mixed.view(_LENGTH, 1, _HEADS, 3 * _HIDDEN // _HEADS)
        query, key, value = (
            part.reshape(_LENGTH, _HEADS, -1) for part in torch.split(mixed, _HIDDEN // _HEADS, 3)
        )
        scores = torch.baddbmm(
            torch.empty(_HEADS, _LENGTH, _LENGTH),
            query.transpose(0, 1),
            key.transpose(0, 1).transpose(1, 2),
            beta=0.0,
            alpha=1 / math.sqrt(_HIDDEN // _HEADS),
        )
        shares = _Softmax.apply(scores, 1.0).view(1, _HEADS, _LENGTH, _LENGTH)
        _fork_random_state()
        shares = self.dropout(shares)
        _fork_random_state()
        context = torch.bmm(shares.view(_HEADS, _LENGTH, -1), value.transpose(0, 1))
        context = context.permute(1, 0, 2).contiguous().view(_LENGTH, 1, _HIDDEN)
        return _Reduce.apply(self.out(context))  # type: ignore[no-any-return]


@torch.jit.script
def _join(branch: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + functional.dropout(branch + bias.expand_as(residual), p=0.1, training=True)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: nn.Module, hidden: Tensor) -> Tensor:  # type: ignore[override]
        ctx.layer, ctx.states = layer, [torch.get_rng_state() for _ in range(3)]
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return layer(hidden)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:  # type: ignore[override]
        states = [torch.get_rng_state() for _ in range(3)]
        for state in ctx.states[:2]:
            torch.set_rng_state(state)
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(hidden)
        for state in states[:2]:
            torch.set_rng_state(state)
        torch.autograd.backward(output, gradient)
        return None, hidden.grad


class _KernelCount(TorchDispatchMode):
    """Counts the operators of PyTorch that are a kernel or more on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, _, _ = function.__name__.partition(".")
        self.count += name not in _NO_KERNELS
        return function(*args, **(kwargs or {}))


def main() -> None:
    """Time the passes of a stack of layers, and print one layer's share."""
    torch.set_num_threads(1)
    layers = nn.ModuleList(_Layer() for _ in range(_LAYERS))
    kept = [_add_up(parameter) for parameter in layers.parameters()]
    times_us = [_time_layer_us(layers) for _ in range(_RUNS + 5)][5:]
    layer_us = min(times_us)
    with _KernelCount() as kernels:
        _time_layer_us(layers)
    sys.stdout.write(
        f"a layer {layer_us:.0f} us, an operator {layer_us / _NUM_OPERATORS:.0f} us "
        f"({len(kept)} gradients added up, torch {torch.__version__}); a layer's"
        f" {_NUM_OPERATORS} operators are {kernels.count / _LAYERS:.0f} kernels\n"
    )


def _add_up(parameter: nn.Parameter) -> Any:
    total = torch.zeros_like(parameter)

    def add(*_: Any) -> None:
        total.add_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None

    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(add)
    return node


def _time_layer_us(layers: nn.ModuleList) -> float:
    hidden = torch.randn(_LENGTH, 1, _HIDDEN, requires_grad=True)
    started_s = time.process_time()
    for layer in layers:
        hidden = _Checkpoint.apply(layer, hidden)  # type: ignore[no-untyped-call]
    hidden.backward(torch.ones_like(hidden))  # type: ignore[no-untyped-call]
    return (time.process_time() - started_s) / _LAYERS * _US_PER_S


if __name__ == "__main__":
    main()
