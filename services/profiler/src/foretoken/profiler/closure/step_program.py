"""What one whole step runs, and which steps are timed where nobody says.

As in a serving engine the step writes one token into memory that is there already: a cache of
`transformers` that grows would copy everything it holds at each step.

Each program is a callable without arguments that queues the step; the caller ends it.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import BatchShape, PrefillShape
from foretoken.domain.lowering.lower import lower_forward
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.profiler.closure.hf_model import HuggingFaceModel
from foretoken.profiler.timing.stopwatch import CaptureError, capture_calls


class FilledLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, `[batch, heads, num_tokens + 1, features]`, random."""

    def __init__(self, num_tokens: int, generator: torch.Generator) -> None:
        """Hold `num_tokens` of each sequence, drawn when the first step says their shape."""
        super().__init__()
        self._num_tokens = num_tokens
        self._generator = generator
        self._place = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Fill the cache with random values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._fill(key_states)
        self.values = self._fill(value_states)
        self._place = torch.tensor([self._num_tokens], device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token after the others, and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._place, key_states)
        self.values.index_copy_(2, self._place, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_args: Any) -> int:
        """Return the tokens before the new one."""
        return self._num_tokens

    def _fill(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = states.shape
        shape = (batch, heads, self._num_tokens + 1, width)
        filled = torch.empty(shape, dtype=self.dtype, device=self.device)
        # One sequence is drawn, all have it: drawing gigabytes would take longer than the step.
        filled[:1].normal_(generator=self._generator)
        if batch > 1:
            filled[1:].copy_(filled[:1].expand(batch - 1, -1, -1, -1))
        return filled


def make_filled_cache(num_layers: int, num_tokens: int, device: torch.device, seed: int) -> Cache:
    """Return a cache of `num_tokens` random tokens in each sequence of any batch."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return Cache(layers=[FilledLayer(num_tokens, generator) for _ in range(num_layers)])


# Kind, sequences, tokens, mode. The first of each kind is the one a quick run takes.
_Row = tuple[str, int, int, str]
_CPU_STEPS: tuple[_Row, ...] = (
    ("prefill", 1, 128, "eager"),
    ("prefill", 1, 512, "eager"),
    ("prefill", 4, 256, "eager"),
    ("decode", 4, 256, "eager"),
    ("decode", 1, 512, "eager"),
    ("decode", 16, 256, "eager"),
    ("training", 1, 128, "eager"),
    ("training", 2, 256, "eager"),
)
_GPU_STEPS: tuple[_Row, ...] = (
    ("prefill", 1, 2048, "eager"),
    ("prefill", 1, 512, "eager"),
    ("prefill", 4, 2048, "eager"),
    ("prefill", 1, 8192, "eager"),
    ("prefill", 1, 2048, "compiled"),
    ("decode", 8, 1024, "graph"),
    ("decode", 1, 1024, "eager"),
    ("decode", 1, 1024, "graph"),
    ("decode", 32, 1024, "eager"),
    ("decode", 32, 1024, "graph"),
    ("decode", 64, 4096, "graph"),
    ("training", 1, 2048, "eager"),
    ("training", 4, 1024, "eager"),
    ("training", 4, 2048, "eager"),
)
# Weights, their gradients, and two moments in the same format.
_TRAINING_COPIES = 4
# Values of a layer that training keeps for each token, over its features: inputs of products, norms
# in fp32, heads, and three of the width of the MLP, about as Korthikanti et al. count them.
_KEPT_PER_FEATURE = 34
# Of the free memory; the rest is the allocator's and what this estimate leaves out.
_MEMORY_RATIO = 0.85


def choose_steps(
    model: ModelArchitecture,
    dtype: DType,
    memory_bytes: float,
    *,
    is_cuda: bool,
    is_quick: bool,
) -> tuple[ClosureStep, ...]:
    """Return the default steps that fit `memory_bytes` and the model's positions."""
    steps = [
        ClosureStep(kind=kind, batch_size=batch_size, num_tokens=num_tokens, mode=mode)
        for kind, batch_size, num_tokens, mode in (_GPU_STEPS if is_cuda else _CPU_STEPS)
    ]
    fitting = [
        step
        for step in steps
        if step.num_tokens < model.max_position
        and step_bytes(model, dtype, step) <= _MEMORY_RATIO * memory_bytes
    ]
    if not is_quick:
        return tuple(fitting)
    first = {step.kind: step for step in reversed(fitting)}
    return tuple(step for step in fitting if first[step.kind] is step)


def step_bytes(model: ModelArchitecture, dtype: DType, step: ClosureStep) -> float:
    """Return about how much memory a step takes, weights included."""
    shape = BatchShape(
        num_tokens=1, num_output_rows=1, prefill=PrefillShape(**prefill_dims(1, 1, 0))
    )
    nodes = lower_forward(model, shape, LoweringOptions(dtype=dtype))
    weights = dtype.num_bytes * float(sum(node.num_weights for node in nodes))
    tokens = step.batch_size * step.num_tokens
    if step.kind == "training":
        layers = _KEPT_PER_FEATURE * model.hidden * model.num_layers * dtype.num_bytes
        # Logits, in fp32 with their softmax and gradients.
        logits = model.vocab * (dtype.num_bytes + 3 * DType.FP32.num_bytes)
        return _TRAINING_COPIES * weights + tokens * (layers + logits)
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    # In a prompt, what one layer works on as well.
    work = 8 * max(model.hidden, model.intermediate) if step.kind == "prefill" else 0
    return weights + tokens * dtype.num_bytes * (kv + work)


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
    forward = _forward(model.module.eval(), step)
    next_tokens = _take_turns(_draw_tokens(model, replace(step, num_tokens=1), device, seed))
    cache = make_filled_cache(model.architecture.num_layers, step.num_tokens, device, seed)
    # What the cache is called has changed within transformers 5.
    is_new = "cache" in inspect.signature(model.module.forward).parameters
    kept = {"cache" if is_new else "past_key_values": cache}

    def run() -> object:
        with torch.no_grad():
            return forward(input_ids=next_tokens(), use_cache=True, **kept).logits

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
