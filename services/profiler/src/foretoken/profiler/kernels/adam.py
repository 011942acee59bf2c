"""One AdamW update of a flat shard; other formats than fp32 keep fp32 master weights next to them.

Fused, as one kernel does it; `foreach`, kernel by kernel over lists of tensors; or tensor by
tensor. Frameworks without a fused optimizer run one of the last two.
"""

from collections.abc import Callable, Mapping

import torch
from torch.optim.adamw import adamw

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    size = dims["num_params"]
    master = tensors.random(size, dtype=torch.float32)
    parameter = master if tensors.dtype is torch.float32 else tensors.random(size)
    return (
        parameter,
        tensors.random(size),
        master,
        tensors.random(size, dtype=torch.float32),
        tensors.random(size, dtype=torch.float32).abs_(),
        torch.ones((), device=tensors.device),
    )


def _bind(*, fused: bool, foreach: bool) -> Callable[[Mapping[str, int]], Callable[..., None]]:
    def run(
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        master: torch.Tensor,
        *state: torch.Tensor,
    ) -> None:
        first_moment, second_moment, step = state
        adamw(
            [master],
            [gradient.to(torch.float32)],
            [first_moment],
            [second_moment],
            [],
            [step],
            fused=fused,
            foreach=foreach,
            # The step's number stays on the device: reading it would wait for the device.
            capturable=step.is_cuda,
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=1e-4,
            weight_decay=0.1,
            eps=1e-8,
            maximize=False,
        )
        if parameter is not master:
            parameter.copy_(master)

    return lambda _: run


def _kernel(name: str) -> Kernel:
    return Kernel(
        operator="adam",
        source=f"torch.optim.adamw.adamw({name})",
        make_inputs=_make_inputs,
        bind=_bind(fused=name == "fused", foreach=name == "foreach"),
    )


KERNEL = Kernel(
    operator="adam",
    source="torch.optim.adamw.adamw(fused)",
    make_inputs=_make_inputs,
    bind=_bind(fused=True, foreach=False),
    alternatives=(_kernel("foreach"), _kernel("for loop")),
)
