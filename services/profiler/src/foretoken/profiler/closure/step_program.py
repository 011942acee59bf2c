"""What one whole step runs: a prompt, a token more for each sequence, or an update of the weights.

Each program is a callable without arguments that queues the step; the caller ends it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.profiler.closure.hf_model import HuggingFaceModel
from foretoken.profiler.timing.graph_capture import CaptureError, capture_calls

Program = Callable[[], object]

# Prompts that steps take turns with, so that no step finds its own tokens in the caches.
_NUM_BATCHES = 4
# Runs before a capture: libraries choose their kernels and take their workspaces then.
_NUM_WARM_UPS = 3


def make_program(
    model: HuggingFaceModel, step: ClosureStep, device: torch.device, seed: int
) -> Program:
    """Return what runs a step in its mode.

    Raises:
        InvalidRequestError: the step cannot be run in that mode here.

    """
    last = step.num_tokens + (1 if step.kind == "decode" else 0)
    architecture = model.architecture
    if architecture.position == "learned" and last > architecture.max_position:
        raise InvalidRequestError.of_field(
            "step", f"{architecture.name} has {architecture.max_position} positions, not {last}"
        )
    run = _MAKERS[step.kind](model, step, device, seed)
    return _capture(run, step, device) if step.mode == "graph" else run


def _prefill(
    model: HuggingFaceModel, step: ClosureStep, device: torch.device, seed: int
) -> Program:
    forward = _forward(model.module.eval(), step)
    next_tokens = _take_turns(_draw_tokens(model, step, device, seed))

    def run() -> object:
        with torch.no_grad():
            # As serving does: logits of the last token alone.
            return forward(input_ids=next_tokens(), use_cache=True, logits_to_keep=1).logits

    return run


def _decode(model: HuggingFaceModel, step: ClosureStep, device: torch.device, seed: int) -> Program:
    from foretoken.profiler.closure.filled_cache import make_filled_cache

    forward = _forward(model.module.eval(), step)
    next_tokens = _take_turns(_draw_tokens(model, replace(step, num_tokens=1), device, seed))
    cache = make_filled_cache(model.architecture.num_layers, step.num_tokens, device, seed)

    def run() -> object:
        with torch.no_grad():
            return forward(input_ids=next_tokens(), past_key_values=cache, use_cache=True).logits

    return run


def _train(model: HuggingFaceModel, step: ClosureStep, device: torch.device, seed: int) -> Program:
    module = model.module.train()
    forward = _forward(module, step)
    next_tokens = _take_turns(_draw_tokens(model, step, device, seed))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)

    def run() -> object:
        tokens = next_tokens()
        loss: Any = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


_MAKERS = {"prefill": _prefill, "decode": _decode, "training": _train}


def _forward(module: Any, step: ClosureStep) -> Callable[..., Any]:
    """Return the model's forward pass, compiled where the step is."""
    forward: Callable[..., Any] = module
    if step.mode == "compiled":
        # What earlier steps compiled would count against the limit of recompilations.
        torch.compiler.reset()
        forward = torch.compile(module, dynamic=False)
    return forward


def _draw_tokens(
    model: HuggingFaceModel, step: ClosureStep, device: torch.device, seed: int
) -> list[torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (step.batch_size, step.num_tokens)
    # What is captured has one input, and compiled code would be compiled again for each.
    count = _NUM_BATCHES if step.mode == "eager" else 1
    vocab = model.architecture.vocab
    return [torch.randint(vocab, shape, generator=generator, device=device) for _ in range(count)]


def _take_turns(batches: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    turn = 0

    def take() -> torch.Tensor:
        nonlocal turn
        turn = (turn + 1) % len(batches)
        return batches[turn]

    return take


def _capture(run: Program, step: ClosureStep, device: torch.device) -> Program:
    """Return the replay of a step that was captured once.

    Source: PyTorch, notes on CUDA semantics, "CUDA Graphs" (warm-up on a side stream).
    """
    if device.type != "cuda":
        raise InvalidRequestError.of_field("step", "graphs are captured on CUDA devices alone")
    if step.kind == "training":
        raise InvalidRequestError.of_field(
            "step", "an optimizer's step is not captured here: time it eager or compiled"
        )
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_NUM_WARM_UPS):
            run()
        try:
            captured = capture_calls(lambda _: run(), 1, device)
        except CaptureError as err:
            raise InvalidRequestError.of_field("step", f"no graph can hold it: {err}") from err
    torch.cuda.current_stream(device).wait_stream(side)
    return captured.replay
