"""Which kernel multiplies matrices in blocks of FP8 on Hopper: DeepGEMM's, a tile for each size.

Its kernels are compiled just in time, for the shape of the weights and the tile, so a product needs
another one wherever its rows call for another tile.
Source: TensorRT-LLM, `cpp/include/tensorrt_llm/deep_gemm/jit_utils.cuh` (get_best_gemm_config) and
`kernels/cutlass_kernels/fp8_blockscale_gemm/fp8_blockscale_gemm_kernel.cuh` (gemm_dispatch,
grouped_gemm_dispatch), as of releases 1.0 to 1.3.
"""

from typing import NamedTuple

from foretoken.domain.units import ceil_divide

ARCHITECTURE, FORMAT = "hopper", "fp8_block"
# Fewer rows are the columns of a product that has the weights first.
_ROWS_MIN = 32
BLOCK_ROWS, _SMALL_BLOCK_ROWS = 128, 64
_BLOCK_COLUMNS = range(16, 129, 8)
_BLOCK_DEPTH = 128
_SHARED_MEMORY_BYTES = 232448
_MULTICAST_ROWS_MIN = 1024


class Tile(NamedTuple):
    """What a kernel is compiled for besides the shape of the weights."""

    has_weights_first: bool
    rows: int
    columns: int
    num_stages: int
    num_multicast: int


def choose_tile(rows: int, columns: int, depth: int, num_sms: int, num_groups: int = 1) -> Tile:
    """Return the tile for a product of so many rows by weights of [columns, depth].

    Of `num_groups` each has so many rows. The fewest waves, the fullest last one, the smallest.
    """
    is_swapped = rows < _ROWS_MIN
    first, second = (columns, rows) if is_swapped else (rows, columns)
    block = _SMALL_BLOCK_ROWS if first <= _SMALL_BLOCK_ROWS else BLOCK_ROWS

    def rank(width: int) -> tuple[int, int, int]:
        num_blocks = int(ceil_divide(first, block) * ceil_divide(second, width)) * num_groups
        return int(ceil_divide(num_blocks, num_sms)), -((num_blocks - 1) % num_sms), width

    width = min(_BLOCK_COLUMNS, key=rank)
    most = 6 if _BLOCK_DEPTH % width else 8
    num_stages = next(
        (
            count
            for count in range(most, 3, -1)
            if _shared_bytes(count, (block, width), depth, is_swapped) <= _SHARED_MEMORY_BYTES
        ),
        0,
    )
    # The chip's processors are an even number; the other operand must divide into pairs of blocks.
    shared = (second, block, first) if is_swapped else (first, width, second)
    has_multicast = (
        num_groups == 1
        and shared[0] >= _MULTICAST_ROWS_MIN
        and shared[2] % (2 * shared[1]) == 0
        and num_sms % 2 == 0
    )
    return Tile(is_swapped, block, width, num_stages, 1 + has_multicast)


def _shared_bytes(num_stages: int, block: tuple[int, int], depth: int, is_swapped: bool) -> int:
    """Return the shared memory of a block of threads."""
    rows, columns = block
    scales = 4 * int(ceil_divide(depth, _BLOCK_DEPTH))
    stage = (rows + columns) * _BLOCK_DEPTH
    if is_swapped:
        stage += int(ceil_divide(4 * columns, 128)) * 128
    else:
        stage += 4 * rows
        scales *= 1 if _BLOCK_DEPTH % columns == 0 else 2
    fixed = 2 * rows * columns + int(ceil_divide(scales, 8)) * 8
    return fixed + num_stages * (stage + 16)
