"""Time whole passes of a model as it runs, to hold the sum of its calls to."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from foretoken.profiler.kernel import TensorFactory
from foretoken.profiler.timing.case import Rig
from foretoken.profiler.timing.timer import time_case

# A pass is long: a few of them say enough.
_MIN_SAMPLES, _PASS_S_MAX = 5, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePass:
    """Times of a model's passes in µs; `backward_us` None: there is none."""

    forward_us: float
    backward_us: float | None


def time_whole_pass(
    model: nn.Module, token_ids: torch.Tensor, rig: Rig, tensors: TensorFactory | None
) -> WholePass:
    """Time the forward pass and, with `tensors` to draw gradients from, the backward pass.

    The backward pass is that from random gradients of the logits to all parameters, without a
    loss; what it takes is the time of both passes less that of the forward pass alone.

    Raises:
        torch.OutOfMemoryError: a pass does not fit.

    """
    timer = dataclasses.replace(
        rig.timer,
        min_samples=min(rig.timer.min_samples, _MIN_SAMPLES),
        case_s_max=min(rig.timer.case_s_max, _PASS_S_MAX),
    )

    def forward(_: int) -> object:
        with torch.no_grad():
            return model(input_ids=token_ids).logits

    def both(_: int) -> object:
        with torch.enable_grad():
            logits = model(input_ids=token_ids).logits
        return torch.autograd.grad(logits, parameters, gradient, allow_unused=True)

    with torch.cuda.stream(rig.stream):
        forward_us = time_case(forward, rig.stopwatch, timer).latency_us_median
        if tensors is None:
            return WholePass(forward_us=forward_us, backward_us=None)
        with torch.no_grad():
            shape = model(input_ids=token_ids).logits.shape
        parameters = list(model.parameters())
        gradient = tensors.random(*shape)
        both_us = time_case(both, rig.stopwatch, timer).latency_us_median
    return WholePass(forward_us=forward_us, backward_us=max(0.0, both_us - forward_us))
