"""Store new keys and values in the paged KV cache."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity


def _elements(d: Dims) -> Quantity:
    return 2 * d["num_tokens"] * d["num_kv_heads"] * d["head_dim"]


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_tokens=pick(quick, (1, 8, 64, 256, 1024), powers_of_two(1, 32768)),
        num_kv_heads=pick(quick, (2, 4), (1, 2, 4, 8, 32)),
        head_dim=pick(quick, (64,), (64, 128, 256)),
    )


SPEC = OperatorSpec(
    name="kv_cache_write",
    summary="scatter keys and values of new tokens into cache blocks",
    dims=(
        Dim("num_tokens", "tokens stored"),
        Dim("num_kv_heads", "key and value heads"),
        Dim("head_dim", "features of a head"),
    ),
    flops=lambda d, _: 0 * d["num_tokens"],
    moved_bytes=lambda d, element_bytes: 2 * _elements(d) * element_bytes + 8 * d["num_tokens"],
    features={"rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms},
    sweep=_sweep,
)
