"""How many rows each expert gets under a routing, and what grouped products want to know of it.

The plain case spreads rows evenly. `power_law_A` takes the domain's law (see
`foretoken.domain.lowering.expert_layer`): the experts' shares have a density that falls as x^-A.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.kernel import Kernel, TensorFactory, runs

_BALANCED = ("", "balanced")
# Routings that are measured in addition to even shares: those of the importers' data.
# Source: AIConfigurator, collector/common_test_cases.py.
SKEWED_ROUTINGS = ("power_law_1.01", "power_law_1.2")
# What serving requests of experts by name, even shares included.
NAMED_ROUTINGS = ("balanced", *SKEWED_ROUTINGS)
_PREFIX = "power_law_"
# A share is between 1 and 0.8 of the rows. Source: `foretoken.domain.lowering.expert_layer`.
_HIGH_SHARE = 0.8
_SEED = 0
# Kernels of grouped products need rows whose strides are a multiple of as many bytes.
_STRIDE_BYTES = 16


@lru_cache(maxsize=1 << 10)
def share_rows(num_rows: int, num_groups: int, routing: str = "", cap: int = 0) -> tuple[int, ...]:
    """Return every group's rows: at least 1 each, at most `cap` (0: any number), `num_rows` in all.

    Even shares differ by one row at most, the larger first. Shares of a power law are its quantiles
    in a fixed random order, so that the same dimensions always mean the same sizes.

    Raises:
        InvalidRequestError: the rows are too few for the groups, or more than `cap` allows.

    """
    cap = cap or num_rows
    if not num_groups <= num_rows <= num_groups * cap:
        raise InvalidRequestError(f"{num_rows} rows cannot reach {num_groups} experts")
    if routing in _BALANCED:
        size, num_larger = divmod(num_rows, num_groups)
        return (size + 1,) * num_larger + (size,) * (num_groups - num_larger)
    shares = _power_law_shares(float(routing.removeprefix(_PREFIX)), num_groups, cap)
    scale = (num_rows - num_groups) / sum(shares)
    sizes = [min(cap, 1 + int(share * scale)) for share in shares]
    missing = num_rows - sum(sizes)
    while missing:
        # Rounding left fewer rows than groups; what the cap cut off may take more rounds.
        for group in sorted(range(num_groups), key=lambda group: -shares[group]):
            if missing and sizes[group] < cap:
                sizes[group], missing = sizes[group] + 1, missing - 1
    random.Random(_SEED).shuffle(sizes)  # noqa: S311 - a fixed order, not a secret
    return tuple(sizes)


def _power_law_shares(exponent: float, num_groups: int, cap: int) -> list[float]:
    """Return the quantiles of a density that falls as x^-exponent between 1 and its largest."""
    power, high = 1 - exponent, max(1.0, _HIGH_SHARE * cap)
    places = [(group + 0.5) / num_groups for group in range(num_groups)]
    if power == 0:
        return [high**place for place in places]
    return [(1 + (high**power - 1) * place) ** (1 / power) for place in places]


def group_ends(sizes: tuple[int, ...], tensors: TensorFactory) -> torch.Tensor:
    """Return where each group of rows ends, as grouped products want it: [groups] of int32."""
    return torch.tensor(sizes, device=tensors.device).cumsum(0).to(torch.int32)


def are_aligned(*names: str, num_bytes: int = 2) -> Callable[[Mapping[str, int]], bool]:
    """Return whether grouped products can read rows as wide as those dimensions.

    A row's bytes must be a multiple of 16, `num_bytes` each value.
    """
    return lambda dims: all(dims[name] * num_bytes % _STRIDE_BYTES == 0 for name in names)


def multiply_scaled_groups(
    x: torch.Tensor,
    weights: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return the FP8 products of groups of rows with weights stored [groups, out, in], in bf16.

    `scales` are [rows] and [groups, out].
    """
    product: torch.Tensor = torch._scaled_grouped_mm(  # noqa: SLF001
        x,
        weights.transpose(-2, -1),
        scale_a=scales[0],
        scale_b=scales[1],
        offs=ends,
        out_dtype=torch.bfloat16,
    )
    return product


def _attempt(device: torch.device) -> object:
    rows = torch.randn(16, 16, device=device).to(torch.bfloat16).requires_grad_()
    weights = torch.randn(2, 16, 16, device=device).to(torch.bfloat16).requires_grad_()
    ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
    product = torch._grouped_mm(rows, weights.transpose(-2, -1), offs=ends)  # noqa: SLF001
    return torch.autograd.grad(product, (rows, weights), torch.ones_like(product))


def _attempt_scaled(device: torch.device) -> object:
    rows = torch.randn(32, 32, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(2, 32, 32, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(32, device=device), torch.ones(2, 32, device=device)
    ends = torch.tensor([16, 32], dtype=torch.int32, device=device)
    return multiply_scaled_groups(rows, weights, scales, ends)


# The same in FP8, forward.
has_scaled_grouped_product = runs(_attempt_scaled)

# Whether torch multiplies groups of rows in one kernel on a device, and has its gradients.
has_grouped_product = runs(_attempt)


def under_routings(
    kernels_of: Callable[[str], tuple[Kernel, ...]], routings: tuple[str, ...]
) -> Kernel:
    """Return `kernels_of("")` and those of every routing as alternatives, each its own variant."""
    plain, *others = kernels_of("")
    for routing in routings:
        others += [
            dataclasses.replace(kernel, variant=f"routing={routing}")
            for kernel in kernels_of(routing)
        ]
    return dataclasses.replace(plain, alternatives=tuple(others))
