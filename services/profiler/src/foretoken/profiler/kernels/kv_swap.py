"""KV blocks between a GPU's memory and pinned memory of its host (`direction=h2d`, `d2h`).

Blocks lie scattered in both caches, and each is a copy of its own, as engines swap them. A machine
without a GPU has one memory: there the blocks go from one buffer of it to another, which says
nothing of a link, and the variant says so (`direction=h2h`).
"""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory, is_cuda

# Blocks in a cache per block moved: its neighbours stay.
_BLOCKS_PER_BLOCK = 2


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory, direction: str) -> Inputs:
    shape = (_BLOCKS_PER_BLOCK * dims["num_blocks"], dims["block_elements"])
    source, target = tensors.random(*shape), tensors.random(*shape)
    if direction == "h2d":
        source = source.cpu().pin_memory()
    if direction == "d2h":
        target = target.cpu().pin_memory()
    return source, target


def _bind(dims: Mapping[str, int]) -> Callable[..., None]:
    num_blocks = dims["num_blocks"]

    def run(source: torch.Tensor, target: torch.Tensor) -> None:
        for block in range(num_blocks):
            place = _BLOCKS_PER_BLOCK * block
            target[place + 1].copy_(source[place], non_blocking=True)

    return run


def _kernel(direction: str, *, is_on_gpu: bool) -> Kernel:
    return Kernel(
        operator="kv_swap",
        source="torch.Tensor.copy_ per block",
        variant=f"direction={direction}",
        make_inputs=lambda dims, tensors: _make_inputs(dims, tensors, direction),
        bind=_bind,
        is_present=lambda device: is_cuda(device) is is_on_gpu,
    )


KERNEL = Kernel(
    operator="kv_swap",
    source="torch.Tensor.copy_ per block",
    variant="direction=h2d",
    make_inputs=lambda dims, tensors: _make_inputs(dims, tensors, "h2d"),
    bind=_bind,
    is_present=is_cuda,
    alternatives=(_kernel("d2h", is_on_gpu=True), _kernel("h2h", is_on_gpu=False)),
)
