"""Token embedding look-up."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_tokens=pick(quick, (1, 32, 256, 1024), powers_of_two(1, 32768)),
        hidden=pick(quick, (512, 1024), powers_of_two(512, 16384)),
        vocab=pick(quick, (4000, 8000), (32000, 128256)),
    )


SPEC = OperatorSpec(
    name="embedding",
    summary="gather one row of the [vocab, hidden] table per token",
    group="embedding",
    dims=(
        Dim("num_tokens", "rows gathered"),
        Dim("hidden", "features of a row"),
        Dim("vocab", "rows of the table"),
    ),
    flops=lambda d, _: 0 * d["num_tokens"],
    moved_bytes=lambda d, element_bytes: d["num_tokens"] * (2 * d["hidden"] * element_bytes + 8),
    features={"rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms},
    sweep=_sweep,
    backward_work_ratio=1.5,
    num_weights=lambda d: d["vocab"] * d["hidden"],
)
