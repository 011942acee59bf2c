"""Move blocks of the KV cache between a device and its host; the row's variant says which way.

Its roofline is the device's memory, a bound that the link to the host never reaches.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_blocks=pick(quick, (1, 16), powers_of_two(1, 1024)[::2]),
        # From 16 tokens of one head of 64 to as many of 32 heads of 128, keys and values.
        block_elements=pick(quick, (4096, 32768), powers_of_two(2048, 131072)[::2]),
    )


SPEC = OperatorSpec(
    name="kv_swap",
    summary="copy KV blocks between device and host memory, one by one",
    group="kv_transfer",
    dims=(
        Dim("num_blocks", "blocks moved, each by a copy of its own"),
        Dim("block_elements", "values in a block: tokens times heads times features"),
    ),
    flops=lambda d, _: 0 * d["num_blocks"],
    # Every byte leaves or reaches the device's memory once.
    moved_bytes=lambda d, element_bytes: d["num_blocks"] * d["block_elements"] * element_bytes,
    features={"block_kib": lambda d, _: d["block_elements"] / 1024},
    sweep=_sweep,
)
