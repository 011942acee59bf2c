"""Choose the next token of every sequence from its logits."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_seqs=pick(quick, (1, 4, 16, 64, 256), powers_of_two(1, 1024)),
        vocab=pick(quick, (4000, 8000), (32000, 128256, 151936)),
    )


SPEC = OperatorSpec(
    name="sampler",
    summary="softmax over the vocabulary and one draw per sequence",
    group="sampler",
    dims=(Dim("num_seqs", "sequences sampled"), Dim("vocab", "logits of a sequence")),
    flops=lambda d, _: 5 * d["num_seqs"] * d["vocab"],
    moved_bytes=lambda d, element_bytes: 3 * d["num_seqs"] * d["vocab"] * element_bytes,
    features={"rows_per_sm": lambda d, num_sms: d["num_seqs"] / num_sms},
    sweep=_sweep,
)
