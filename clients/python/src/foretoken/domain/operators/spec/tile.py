"""What the latency of tiled matrix products grows with: waves of tiles, and work per wave."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from foretoken.domain.operators.spec.operator import Dims, FeatureFormula
from foretoken.domain.units import Quantity, ceil_divide

# (dims) -> products of a batch, and m, n and k of each
TiledProduct: TypeAlias = Callable[[Dims], tuple[Quantity, Quantity, Quantity, Quantity]]

# Output tile shapes that cuBLAS and CUTLASS choose among (rows of m, columns of n); the first is
# what few tokens are padded to. Source: CUTLASS profiler defaults for sm80 and sm90.
_TILES = ((16, 128), (64, 64), (128, 64), (128, 128), (128, 256), (256, 128))


def tile_costs(product: TiledProduct) -> Mapping[str, FeatureFormula]:
    """Return waves of every tile shape, times a tile's inner products and its outputs.

    To them the traffic with each matrix, and the steps along k that no parallelism shortens.
    """
    return {
        **{f"products_{m}x{n}": _wave_cost(product, (m, n), has_k=True) for m, n in _TILES},
        **{f"outputs_{m}x{n}": _wave_cost(product, (m, n), has_k=False) for m, n in _TILES},
        "steps": lambda d, _: product(d)[3],
        "weights": lambda d, _: _volume(product(d), 2, 3),
        "outputs": lambda d, _: _volume(product(d), 1, 2),
        "inputs": lambda d, _: _volume(product(d), 1, 3),
    }


def _wave_cost(product: TiledProduct, tile: tuple[int, int], *, has_k: bool) -> FeatureFormula:
    tile_m, tile_n = tile

    def cost(d: Dims, num_sms: int) -> Quantity:
        batch, m, n, k = product(d)
        num_tiles = batch * ceil_divide(m, tile_m) * ceil_divide(n, tile_n)
        return ceil_divide(num_tiles, num_sms) * tile_m * tile_n * (k if has_k else 1)

    return cost


def _volume(shape: tuple[Quantity, ...], first: int, second: int) -> Quantity:
    return shape[0] * shape[first] * shape[second]
