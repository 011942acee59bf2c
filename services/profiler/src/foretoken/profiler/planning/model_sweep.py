"""The operator calls that a model requests in serving, training, and as transformers runs it.

Models are lowered as the simulator lowers them, so that a point measured is a point asked about.
What depends on tokens alone is lowered apart from what depends on contexts: their product would
say nothing more.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    OperatorNode,
    PrefillShape,
    RankContext,
)
from foretoken.domain.lowering.lower import lower_backward, lower_rank
from foretoken.domain.lowering.options import LoweringOptions, TrainingOptions
from foretoken.domain.lowering.training_layer import check_kernels, update_kernels
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.attention_prefill import prefill_dims, unequal_prefill_dims
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.domain.operators.spec.sweep import powers_of_two
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.units import ceil_divide
from foretoken.profiler.closure.hf_config import config_of_architecture

_ACTIVATION_KEYS = ("hidden_act", "activation_function")
# The context of decoding sequences: with the new token a power of two, as engines are asked about.
_CONTEXT_TOKENS = 1023


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerGrid:
    """Prompts of one sequence, by their tokens, and decoding steps, by their sequences."""

    prefill_tokens: tuple[int, ...]
    decode_seqs: tuple[int, ...]


def eager_nodes(
    grid: EagerGrid,
    micro_batches: Sequence[tuple[int, int]],
    num_params: Sequence[int],
    model: ModelArchitecture,
    dtype: DType,
) -> Iterator[OperatorNode]:
    """Yield the operators of forward steps of a grid, and of training on these micro batches.

    The optimizer's update comes for as many parameters as `num_params` say, each cut into as many
    tensors as the model has: all of a large model's would not fit a device.
    """
    form = _form_of(model)
    longest = model.max_position
    steps = [("prefill", 1, tokens) for tokens in grid.prefill_tokens if tokens <= longest]
    steps += [("decode", seqs, min(_CONTEXT_TOKENS, longest - 1)) for seqs in grid.decode_seqs]
    steps += [("training", seqs, tokens) for seqs, tokens in micro_batches]
    updates: dict[int, OperatorNode] = {}
    for kind, batch_size, num_tokens in steps:
        step = ClosureStep(kind=kind, batch_size=batch_size, num_tokens=num_tokens)
        for node in lower_step(step, model, dtype, form):
            if node.operator != "fused_adam":
                yield node
                continue
            for size in num_params:
                dims = {**node.dims, "num_params": size}
                updates[size] = replace(node, dims=dims)
    yield from (node for size, node in updates.items() if size >= node.dims["num_tensors"])


def _form_of(model: ModelArchitecture) -> ModelForm:
    """Return how `transformers` runs an architecture: as the model type it would be built as."""
    try:
        content = config_of_architecture(model)
    except InvalidRequestError:
        return ModelForm()
    activation = next((str(content[key]) for key in _ACTIVATION_KEYS if key in content), "")
    return ModelForm(model_type=str(content["model_type"]), activation=activation)


# (sequences, new tokens of each, context before them)
PrefillPoint = tuple[int, int, int]
# (sequences, mean context, longest context over the mean)
DecodePoint = tuple[int, int, int]
# (sequences, tokens of each)
MicroBatch = tuple[int, int]

# The frameworks whose kernels are distinguished: torch as it is written, and fused ones.
TRAINERS = ("plain", "megatron-core", "torchtitan")
# Formats that serving keeps weights in, by the scheme that stores them.
_SCHEMES = {DType.FP8: "fp8", DType.INT8: "sq"}
# What decoding sequences may hold together: a few GB of a layer's keys and values.
_MAX_DECODE_TOKENS = 2**21
_MAX_PREFILL_TOKENS = 2**16
_MOST_PARAMS = 2**30
# The longest of a ragged batch over its mean, at most.
_RAGGEDNESS = 3
# A look-up reads its rows alone, however many a table has: of tables that trainers fill up no other
# numbers of tokens than these are measured, in steps of four.
_LOOK_UP_TOKENS = frozenset(4**e for e in range(9))
_HEAD_DIMS = ("num_heads", "num_kv_heads", "head_dim")
_CONTEXT_DIMS = ("kv_tokens", "kv_tokens_max")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGrid:
    """The batches a model is lowered for.

    `num_tokens` go through the layers, `num_rows` sequences through head and sampler. Of
    `ragged_prefills` the numbers are means, the sequences a multiple of four. `mixed` are
    (tokens of a prefill, decoding point next to it). With training, `eager` are the steps that
    `transformers` runs, on one device, in addition to the micro batches.
    """

    num_tokens: tuple[int, ...]
    num_rows: tuple[int, ...]
    prefills: tuple[PrefillPoint, ...]
    ragged_prefills: tuple[PrefillPoint, ...] = ()
    decodes: tuple[DecodePoint, ...]
    mixed: tuple[tuple[int, DecodePoint], ...]
    micro_batches: tuple[MicroBatch, ...]
    num_params: tuple[int, ...]
    eager: EagerGrid


def _full_grid() -> BatchGrid:
    # Tiles of 8 to 256 rows make steps: between powers of two there is another point from 16 on.
    tokens = sorted({1, 2, 4, *powers_of_two(8, 16384), *(3 * 2**e for e in range(3, 13)), 80, 320})
    short = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
    prefills = [(1, q, 0) for q in short]
    contexts = (512, 2048, 8192, 32768)
    prefills += [(1, q, context) for q in (16, 128, 512, 2048, 8192) for context in contexts]
    prefills += [(n, q, 0) for n in (2, 8) for q in (32, 128, 512, 2048)]
    prefills += [(8, q, 2048) for q in (32, 128, 512)]
    decodes = [
        (n, mean, 1)
        for n in (*powers_of_two(1, 512), 24, 96, 192, 384)
        for mean in powers_of_two(128, 65536)
    ]
    decodes += [(n, mean, ratio) for n in (8, 64) for mean in (512, 4096) for ratio in (2, 4)]
    mixed = [
        (q, (n, mean, 1)) for q in (128, 512, 2048) for n in (4, 32, 128) for mean in (512, 4096)
    ]
    return BatchGrid(
        num_tokens=tuple(tokens),
        num_rows=(*powers_of_two(1, 512), 24, 48, 96, 192, 384),
        prefills=tuple(prefills),
        ragged_prefills=((4, 512, 0), (4, 512, 1024), (8, 128, 2048), (8, 512, 0)),
        decodes=tuple(decodes),
        mixed=tuple(mixed),
        micro_batches=tuple((n, s) for s in (1024, 2048, 4096, 8192) for n in (1, 2, 4)),
        num_params=powers_of_two(2**16, _MOST_PARAMS),
        eager=EagerGrid(
            prefill_tokens=(128, 512, 1024, 2048, 4096, 8192), decode_seqs=(1, 4, 8, 16, 32, 64)
        ),
    )


def _quick_grid() -> BatchGrid:
    prefills = [(1, q, 0) for q in (32, 128, 256, 512, 1024, 2048, 4096)]
    prefills += [(1, 128, 1024), (1, 512, 2048), (1, 512, 8192), (4, 256, 0), (8, 64, 0)]
    return BatchGrid(
        num_tokens=(1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096),
        num_rows=(1, 4, 16, 64, 256),
        prefills=tuple(prefills),
        decodes=tuple((n, mean, 1) for n in (1, 4, 16, 64, 256) for mean in (256, 1024, 4096)),
        mixed=((128, (16, 1024, 1)), (512, (32, 1024, 1)), (2048, (64, 1024, 1))),
        micro_batches=((1, 1024), (1, 2048), (2, 2048)),
        num_params=(2**20, 2**22, 2**24, 2**27),
        eager=EagerGrid(prefill_tokens=(128, 512, 2048), decode_seqs=(1, 16)),
    )


FULL_GRID = _full_grid()
QUICK_GRID = _quick_grid()


@dataclass(slots=True)
class ModelCalls:
    """Calls without repetition, in the order they were found, and what was left out and why."""

    calls: dict[tuple[object, ...], OperatorCall] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, node: OperatorNode) -> None:
        """Take the call of a node."""
        call = node.call
        if any(call.dims[dim.name] < dim.minimum for dim in all_operators()[call.operator].dims):
            return
        key = (call.operator, call.dtype, call.phase, call.variant, *sorted(call.dims.items()))
        self.calls.setdefault(key, call)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSweep:
    """Which models, cut how, in which formats, over which batches."""

    models: tuple[ModelArchitecture, ...]
    tp_sizes: tuple[int, ...]
    dtypes: tuple[DType, ...]
    grid: BatchGrid
    has_training: bool = False
    devices_per_node: int = 8


def collect_calls(sweep: ModelSweep) -> ModelCalls:
    """Return every call of the sweep once; a model that cannot be cut so is left out with a reason.

    Raises:
        InvalidRequestError: no model can be cut in any of the ways asked for.

    """
    found = ModelCalls()
    for model in sweep.models:
        for tp in sweep.tp_sizes or (1,):
            rank = RankContext(
                model=model,
                layout=ParallelLayout(tp=tp),
                devices_per_node=max(sweep.devices_per_node, tp),
            )
            for dtype in sweep.dtypes:
                try:
                    _add_rank(found, sweep, rank, dtype)
                except InvalidRequestError as err:
                    found.left_out[f"{model.name} tp {tp}: {err.message}"] += 1
    if not found.calls:
        raise InvalidRequestError.of_field("models", "; ".join(found.left_out))
    return found


def _add_rank(found: ModelCalls, sweep: ModelSweep, rank: RankContext, dtype: DType) -> None:
    for node in _rank_nodes(sweep, rank, dtype):
        if node.operator != "embedding" or _is_look_up_wanted(node, rank):
            found.add(node)


def _is_look_up_wanted(node: OperatorNode, rank: RankContext) -> bool:
    rows = ceil_divide(rank.model.vocab, rank.layout.tp)
    return node.dims["vocab"] == rows or node.dims["num_tokens"] in _LOOK_UP_TOKENS


def _rank_nodes(sweep: ModelSweep, rank: RankContext, dtype: DType) -> Iterator[OperatorNode]:
    for shape in _serving_shapes(sweep.grid, rank.model):
        yield from lower_rank(shape, serving_options(dtype), rank)
    yield from _mixed_nodes(sweep.grid, rank, dtype)
    if not sweep.has_training:
        return
    for trainer in TRAINERS:
        yield from _training_nodes(sweep.grid, rank, dtype, trainer)
    if rank.layout.tp == 1:
        micro_batches = list(_micro_batches(sweep.grid, rank.model))
        num_params = sweep.grid.num_params
        yield from eager_nodes(sweep.grid.eager, micro_batches, num_params, rank.model, dtype)


def serving_options(dtype: DType) -> LoweringOptions:
    """Return how the default engine runs a model whose weights are stored in that format."""
    scheme = _SCHEMES.get(dtype, "")
    return LoweringOptions(
        dtype=DType.BF16 if scheme else dtype,
        has_kv_cache=True,
        has_sampler=True,
        fuses_add_norm=EngineSpec().resolve().fuses_add_norm,
        quantization=scheme,
    )


def _serving_shapes(grid: BatchGrid, model: ModelArchitecture) -> Iterator[BatchShape]:
    one = BatchShape(num_tokens=1, num_output_rows=1, num_group_tokens=1)
    for num_tokens in grid.num_tokens:
        yield replace(one, num_tokens=num_tokens)
    for num_rows in grid.num_rows:
        yield replace(one, num_output_rows=num_rows)
    for num_seqs, q_len, context in _prefills(grid, model):
        yield replace(one, prefill=PrefillShape(**prefill_dims(num_seqs, q_len, context)))
    for num_seqs, q_len, context in grid.ragged_prefills:
        if _RAGGEDNESS * (q_len + context) <= model.max_position:
            dims = unequal_prefill_dims(num_seqs, q_len, context)
            yield replace(one, prefill=PrefillShape(**dims))
    for point in grid.decodes:
        if _fits(point, model):
            yield replace(one, decode=_decode_shape(point))


def _prefills(grid: BatchGrid, model: ModelArchitecture) -> Iterator[PrefillPoint]:
    """Yield prefills no longer than the model's context, its longest one instead of those above."""
    for num_seqs, q_len, context in grid.prefills:
        new_tokens = min(q_len, model.max_position)
        if new_tokens + context <= model.max_position and num_seqs * q_len <= _MAX_PREFILL_TOKENS:
            yield num_seqs, new_tokens, context


def _fits(point: DecodePoint, model: ModelArchitecture) -> bool:
    num_seqs, mean, ratio = point
    return mean * ratio <= model.max_position and num_seqs * mean <= _MAX_DECODE_TOKENS


def _decode_shape(point: DecodePoint) -> DecodeShape:
    num_seqs, mean, ratio = point
    kv_tokens = num_seqs * mean
    longest = min(mean * ratio, kv_tokens - num_seqs + 1)
    return DecodeShape(num_seqs=num_seqs, kv_tokens=kv_tokens, kv_tokens_max=longest)


def _mixed_nodes(grid: BatchGrid, rank: RankContext, dtype: DType) -> Iterator[OperatorNode]:
    """Yield decoding sequences inside the kernel that computes prefills, and that without them.

    The difference is what a simulation queries.
    """
    for q_len, point in grid.mixed:
        if not _fits(point, rank.model) or q_len > rank.model.max_position:
            continue
        batch = prefill_dims(1, q_len, 0)
        shape = BatchShape(
            num_tokens=1,
            num_output_rows=1,
            num_group_tokens=1,
            prefill=PrefillShape(**batch),
            decode=_decode_shape(point),
        )
        for node in lower_rank(shape, serving_options(dtype), rank):
            if node.operator == "attention_prefill":
                yield node
            elif node.operator == "attention_decode":
                heads = {name: node.dims[name] for name in _HEAD_DIMS}
                decode = {f"decode_{name}": node.dims[name] for name in _CONTEXT_DIMS}
                dims = {**batch, "num_decode_seqs": node.dims["num_seqs"], **decode, **heads}
                yield replace(node, operator="attention_mixed", dims=dims)


def _training_nodes(
    grid: BatchGrid, rank: RankContext, dtype: DType, trainer: str
) -> Iterator[OperatorNode]:
    profile = TrainerSpec(profile=trainer).resolve()
    # Frameworks fill the vocabulary up until every rank has as many rows.
    multiple = profile.vocab_multiple * rank.layout.tp
    vocab = int(ceil_divide(rank.model.vocab, multiple)) * multiple
    padded = replace(rank, model=replace(rank.model, vocab=vocab))
    for num_seqs, length in _micro_batches(grid, rank.model):
        options = LoweringOptions(
            dtype=dtype,
            has_loss=True,
            mla_form="operators",
            training=TrainingOptions(
                trainer=profile, micro_batch_size=num_seqs, sequence_length=length
            ),
        )
        num_tokens = num_seqs * length
        shape = BatchShape(
            num_tokens=num_tokens,
            num_output_rows=num_tokens,
            prefill=PrefillShape(**prefill_dims(num_seqs, length, 0)),
        )
        nodes = lower_rank(shape, options, padded)
        yield from nodes
        yield from lower_backward(nodes, options)
    for num_params in grid.num_params:
        yield from check_kernels(num_params, dtype, profile)
        yield from update_kernels(num_params, dtype, profile)


def _micro_batches(grid: BatchGrid, model: ModelArchitecture) -> Iterator[MicroBatch]:
    for num_seqs, length in grid.micro_batches:
        yield num_seqs, min(length, model.max_position)
