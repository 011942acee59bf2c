"""Kernels that a host compiles when a step with prompts is the first to need them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from foretoken.domain.frameworks.deep_gemm import ARCHITECTURE, BLOCK_ROWS, FORMAT, choose_tile
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.family import prompt_nodes
from foretoken.simulator.cost.latency_surfaces import engine_layout, serving_options
from foretoken.simulator.grid import Flags, Ints
from foretoken.simulator.rank import stage_ranks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompiledKernels:
    """What each number of tokens needs, as places among kernels that take `us` each to compile.

    `own` is [product, tokens of an engine], `group` [product, tokens of all that run in lock step].
    Those `ready` are there before the first step. Ranks compile their own at once, and wait for the
    one that has most to do; `group` is the same on all.
    """

    us: float
    own: Ints
    group: Ints
    ready: Flags


@dataclass(frozen=True, kw_only=True, slots=True)
class _Product:
    """Weights of [columns, depth] for each of `num_groups`.

    Its tile is chosen as if each group had all tokens as rows. Source: TensorRT-LLM,
    fp8_blockscale_gemm.cu (`getWorkspaceSize`), which takes the rows of the whole for what an
    expert is expected to have.
    """

    columns: int
    depth: int
    num_groups: int = 1
    is_of_group: bool = False


def kernels_of_lengths(time_us: float, num_tokens: int) -> CompiledKernels | None:
    """Return one kernel for each number of tokens, up to so many; None where that takes no time."""
    if time_us == 0:
        return None
    return CompiledKernels(
        us=time_us,
        own=np.arange(num_tokens + 1)[None],
        group=np.zeros((0, 1), dtype=np.int64),
        ready=np.zeros(num_tokens + 1, dtype=np.bool_),
    )


def find_kernels(scenario: ServingScenario, engine: EngineProfile) -> CompiledKernels | None:
    """Return what the engine of a scenario compiles while it serves; None: nothing."""
    most = engine.max_num_batched_tokens
    kinds = (kind.name for kind in stack_of(scenario.model).kinds)
    by_length = kernels_of_lengths(engine.compile_us_of(kinds), most)
    device = find_device(scenario.device)
    has_products = engine.is_fresh and engine.product_compile_us > 0
    if by_length or not has_products or device.architecture != ARCHITECTURE:
        return by_length
    products = list(dict.fromkeys(_products(scenario)))
    if not products:
        return None
    sizes = sorted({1, most, *_captured(engine)})
    return _place(
        engine.product_compile_us,
        [_tiles(product, most, device.num_sms) for product in products if not product.is_of_group],
        [
            _tiles(product, most * engine_layout(scenario).dp, device.num_sms)
            for product in products
            if product.is_of_group
        ],
        # Every rank has as many tokens when a server starts.
        (sizes, [size * engine_layout(scenario).dp for size in sizes]),
    )


def _captured(engine: EngineProfile) -> Iterator[int]:
    """Yield the batches that decode and were captured."""
    if engine.graph_mode != "none":
        yield from (size for size in engine.graph_capture_sizes if size <= engine.max_num_seqs)


def _products(scenario: ServingScenario) -> Iterator[_Product]:
    """Yield the products in blocks of FP8 of a prompt's step, on a rank of every stage."""
    options = replace(serving_options(scenario), mla_form="operators")
    layout = engine_layout(scenario)
    for rank in stage_ranks(scenario.model, layout, scenario.device, scenario.topology):
        for node in prompt_nodes(options, rank):
            if parse_variant(node.variant).get("quant") == FORMAT:
                yield from _products_of(node)


def _products_of(node: OperatorNode) -> Iterator[_Product]:
    if node.operator == "gemm":
        yield _Product(columns=_size(node, "n"), depth=_size(node, "k"))
    elif node.is_experts:
        hidden, intermediate = _size(node, "hidden"), _size(node, "intermediate")
        held = "num_local_experts" if "num_local_experts" in node.dims else "num_experts"
        for columns, depth in ((2 * intermediate, hidden), (hidden, intermediate)):
            yield _Product(
                columns=columns,
                depth=depth,
                num_groups=_size(node, held),
                is_of_group=True,
            )


def _size(node: OperatorNode, name: str) -> int:
    return int(np.asarray(node.dims[name]).ravel()[0])


@lru_cache(maxsize=256)
def _tiles(product: _Product, num_tokens: int, num_sms: int) -> tuple[tuple[object, ...], ...]:
    """Return the kernel of each number of tokens, from 0 on."""
    found: dict[int, tuple[object, ...]] = {}
    kernels = []
    for tokens in range(num_tokens + 1):
        rows = max(tokens, 1)
        # More rows than a block has one tile for as many blocks, but for what is even.
        is_even = rows <= BLOCK_ROWS or rows % BLOCK_ROWS == 0
        band = rows if is_even else BLOCK_ROWS * (rows // BLOCK_ROWS) + 1
        if band not in found:
            tile = choose_tile(rows, product.columns, product.depth, num_sms, product.num_groups)
            found[band] = (product.columns, product.depth, product.num_groups, tile)
        kernels.append(found[band])
    return tuple(kernels)


def _place(
    time_us: float,
    own: Sequence[Sequence[object]],
    group: Sequence[Sequence[object]],
    ready: tuple[Iterable[int], Iterable[int]],
) -> CompiledKernels:
    """Return kernels as places, those of some numbers of tokens ready."""
    places: dict[object, int] = {}
    tables = [
        np.array(
            [[places.setdefault(kernel, len(places)) for kernel in row] for row in rows],
            dtype=np.int64,
        ).reshape(len(rows), -1)
        for rows in (own, group)
    ]
    is_ready = np.zeros(len(places), dtype=np.bool_)
    for table, tokens in zip(tables, ready, strict=True):
        is_ready[table[:, list(tokens)] if table.size else []] = True
    return CompiledKernels(us=time_us, own=tables[0], group=tables[1], ready=is_ready)
