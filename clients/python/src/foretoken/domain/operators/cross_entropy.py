"""Loss over the vocabulary, the last operator of a training forward pass."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_tokens=pick(quick, (16, 128, 1024), powers_of_two(16, 16384)),
        vocab=pick(quick, (4000, 8000), (16032, 32000, 50304, 128256, 151936)),
    )


SPEC = OperatorSpec(
    name="cross_entropy",
    summary="log-softmax over the vocabulary and the negative log likelihood per token",
    group="loss",
    dims=(Dim("num_tokens", "rows"), Dim("vocab", "logits of a row")),
    flops=lambda d, _: 5 * d["num_tokens"] * d["vocab"],
    moved_bytes=lambda d, element_bytes: 2 * d["num_tokens"] * d["vocab"] * element_bytes,
    features={"rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms},
    sweep=_sweep,
    backward_work_ratio=1.0,
    # The softmax is kept in fp32.
    saved_elements=lambda d: 2 * d["num_tokens"] * d["vocab"],
)
