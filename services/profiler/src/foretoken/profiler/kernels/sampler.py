"""The next token of every sequence.

The plain case draws from all of the vocabulary: the largest of probabilities over noise.
Variants take the likeliest (`sampling=greedy`) or draw from the likeliest few: `top_k`, `top_p` and
`top_k_top_p`, with torch by sorting, with FlashInfer without. Limits are those common in serving.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory, has_library, library

TOP_K = 50
TOP_P = 0.9


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_seqs"], dims["vocab"]),)


def _draw(probabilities: torch.Tensor) -> torch.Tensor:
    # The index that wins a race of exponential clocks is drawn in proportion to the rates.
    noise = torch.empty_like(probabilities).exponential_()
    return (probabilities / noise).argmax(dim=-1)


def _run(logits: torch.Tensor) -> torch.Tensor:
    return _draw(torch.softmax(logits, dim=-1, dtype=torch.float32))


def _run_greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _bind_top_k(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    size = min(TOP_K, dims["vocab"])

    def run(logits: torch.Tensor) -> torch.Tensor:
        values, tokens = logits.topk(size, dim=-1)
        place = _draw(torch.softmax(values, dim=-1, dtype=torch.float32))
        return tokens.gather(-1, place.unsqueeze(-1)).squeeze(-1)

    return run


def _bind_top_p(dims: Mapping[str, int], *, has_top_k: bool = False) -> Callable[..., torch.Tensor]:
    size = min(TOP_K, dims["vocab"])

    def run(logits: torch.Tensor) -> torch.Tensor:
        values, tokens = logits.sort(dim=-1, descending=True)
        if has_top_k:
            values, tokens = values[..., :size], tokens[..., :size]
        probabilities = torch.softmax(values, dim=-1, dtype=torch.float32)
        # A token stays while those before it do not reach the limit; the first always does.
        before = probabilities.cumsum(dim=-1) - probabilities
        place = _draw(probabilities.masked_fill(before >= TOP_P, 0.0))
        return tokens.gather(-1, place.unsqueeze(-1)).squeeze(-1)

    return run


def _bind_flashinfer(function: str, *limits: float) -> Callable[..., Callable[..., Any]]:
    def bind(_dims: Mapping[str, int]) -> Callable[..., Any]:
        sample = getattr(library("flashinfer.sampling"), function)

        def run(logits: torch.Tensor) -> object:
            return sample(torch.softmax(logits, dim=-1, dtype=torch.float32), *limits)

        return run

    return bind


def _flashinfer(variant: str, function: str, *limits: float) -> Kernel:
    return Kernel(
        operator="sampler",
        source=f"flashinfer.sampling.{function}",
        variant=variant,
        make_inputs=_make_inputs,
        bind=_bind_flashinfer(function, *limits),
        is_present=has_library("flashinfer"),
    )


def _torch(variant: str, source: str, bind: Callable[..., Callable[..., torch.Tensor]]) -> Kernel:
    return Kernel(
        operator="sampler", source=source, variant=variant, make_inputs=_make_inputs, bind=bind
    )


KERNEL = Kernel(
    operator="sampler",
    source="torch.softmax + exponential race",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    alternatives=(
        _flashinfer("", "sampling_from_probs"),
        _torch("sampling=greedy", "torch.argmax", lambda _: _run_greedy),
        _flashinfer("sampling=top_k", "top_k_sampling_from_probs", TOP_K),
        _torch("sampling=top_k", "torch.topk + exponential race", _bind_top_k),
        _flashinfer("sampling=top_p", "top_p_sampling_from_probs", TOP_P),
        _torch("sampling=top_p", "torch.sort + exponential race", _bind_top_p),
        _flashinfer("sampling=top_k_top_p", "top_k_top_p_sampling_from_probs", TOP_K, TOP_P),
        _torch(
            "sampling=top_k_top_p",
            "torch.sort + exponential race",
            lambda dims: _bind_top_p(dims, has_top_k=True),
        ),
    ),
)
