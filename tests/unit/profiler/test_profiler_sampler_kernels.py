"""Draws of a next token: from which tokens, and how often."""

import pytest
import torch

from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.profiler.kernel import TensorFactory, kernel_of_call
from foretoken.profiler.kernels.sampler import TOP_K, TOP_P

_DIMS = {"num_seqs": 200, "vocab": 300}


def _sample(variant: str, logits: torch.Tensor) -> torch.Tensor:
    call = OperatorCall(operator="sampler", dtype=DType.FP32, variant=variant)
    kernel = kernel_of_call(call, torch.device("cpu"))
    drawn: torch.Tensor = kernel.bind(_DIMS)(logits)
    return drawn


def _logits() -> torch.Tensor:
    tensors = TensorFactory(torch.device("cpu"), torch.float32, seed=1)
    return 2.0 * tensors.random(_DIMS["num_seqs"], _DIMS["vocab"])


def _ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of a row are likelier than the one drawn."""
    drawn = logits.gather(1, tokens.unsqueeze(1))
    return (logits > drawn).sum(dim=1)


def test_a_greedy_sampler_takes_the_likeliest() -> None:
    logits = _logits()
    assert 0 == int(_ranks(logits, _sample("sampling=greedy", logits)).max())


def test_the_likeliest_few_are_all_that_is_drawn_from() -> None:
    logits = _logits()
    ranks = _ranks(logits, _sample("sampling=top_k", logits))
    assert 1 <= int(ranks.max()) < TOP_K


@pytest.mark.parametrize("variant", ["sampling=top_p", "sampling=top_k_top_p"])
def test_tokens_come_from_the_smallest_set_that_reaches_the_limit(variant: str) -> None:
    logits = _logits()
    tokens = _sample(variant, logits)
    if variant == "sampling=top_k_top_p":
        least = logits.topk(TOP_K, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = logits.double().softmax(dim=1)
    drawn = chances.gather(1, tokens.unsqueeze(1))
    before = chances.masked_fill(chances <= drawn, 0.0).sum(dim=1)
    assert float(before.max()) < TOP_P
    assert 1 <= int(_ranks(logits, tokens).max())


@pytest.mark.parametrize(
    "variant", ["", "sampling=top_k", "sampling=top_p", "sampling=top_k_top_p"]
)
def test_tokens_are_drawn_as_often_as_they_are_likely(variant: str) -> None:
    """Three tokens that no limit cuts off, at 1, 2 and 5 in 8."""
    torch.manual_seed(1)
    row = torch.full((_DIMS["vocab"],), -100.0)
    row[[7, 70, 170]] = torch.tensor([1.0, 2.0, 5.0]).log()
    tokens = torch.cat(
        [_sample(variant, row.expand(_DIMS["num_seqs"], -1).contiguous()) for _ in range(40)]
    )
    shares = torch.tensor([(tokens == token).float().mean() for token in (7, 70, 170)])
    # Three standard deviations of 8000 draws.
    torch.testing.assert_close(torch.tensor([1.0, 2.0, 5.0]) / 8, shares, atol=0.017, rtol=0.0)
