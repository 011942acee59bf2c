"""Host time of the hook that ends a weight's gradient: the source of `expert_hook_us` in profiles.

Run: python tests/benchmarks/host_time_of_hook.py FOLDER (needs PyTorch, the extra `profiler`)

FOLDER has Megatron-Core's sources, whose own `DistributedDataParallel` is timed on a CPU: autograd
hands it the gradient of every weight, which says that it was added up already, as fused products
say. Modules have several weights each, as Transformer Engine's grouped product has one of every
expert, of a few elements. Prints the least processor time for a weight, without the wrapper and
with it, its sums overlapped or not.
"""

import importlib
import os
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

_NUM_WEIGHTS, _PER_MODULE, _RUNS = 640, 8, 30
_US_PER_S = 1e6
_HANDED_ON = torch.zeros(4, 4)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.weights = weights
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        for weight in ctx.weights:
            weight.grad_added_to_main_grad = True
        return (gradient, *(_HANDED_ON for _ in ctx.weights))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(4, 4) for _ in range(_NUM_WEIGHTS)])

    def forward(self, values: Tensor) -> Tensor:
        for start in range(0, _NUM_WEIGHTS, _PER_MODULE):
            weights = self.weights[start : start + _PER_MODULE]
            values = _Product.apply(values, *weights)  # type: ignore[no-untyped-call]
        return values


def main(folder: str) -> None:
    """Print what a weight takes."""
    sys.path.insert(0, folder)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Its buffers of gradients are on the current device.
    setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # noqa: B010 - see above
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")
    plain_us = _time_us(_Layers())
    found = [_time_us(_wrap(_Layers(), is_overlapped=flag)) for flag in (True, False)]
    sys.stdout.write(
        f"a weight {plain_us:.1f} us, with Megatron-Core's hook {found[0]:.1f} us where sums are"
        f" overlapped, {found[1]:.1f} where not\n"
    )


def _wrap(layers: nn.Module, *, is_overlapped: bool) -> nn.Module:
    distributed, parallel_state, transformer = (
        importlib.import_module(f"megatron.core.{name}")
        for name in ("distributed", "parallel_state", "transformer")
    )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    options = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=is_overlapped
    )
    model = transformer.TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    wrapped: nn.Module = distributed.DistributedDataParallel(model, options, layers)
    return wrapped


def _time_us(layers: Any) -> float:
    times_us = []
    for _ in range(_RUNS):
        if hasattr(layers, "zero_grad_buffer"):
            layers.zero_grad_buffer()
        values = layers(torch.randn(4, 4, requires_grad=True))
        started_s = time.process_time()
        values.backward(torch.ones_like(values))
        times_us.append((time.process_time() - started_s) * _US_PER_S)
        if hasattr(layers, "finish_grad_sync"):
            layers.finish_grad_sync()
        else:
            layers.zero_grad()
    return min(times_us) / _NUM_WEIGHTS


if __name__ == "__main__":
    main(*sys.argv[1:2])
