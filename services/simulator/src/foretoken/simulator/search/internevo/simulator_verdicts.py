"""Which points InternEvo's simulator says can run and have the memory, by its own rules.

They are not those of InternEvo. One configuration serves all its points: the first writes its
number of micro batches into it as `gradient_accumulation`, and of the later points those of one
stage that have another number fail the check that both are equal, though alone they would run.
Memory is a formula of the first stage, against 80 GiB of any device.
Source: InternEvo, `simulation_train_formulaic.py`, `internlm/simulator/formulas/mem.py` and
`args_sanity_check` of `internlm/initialize/launch.py`, 0.5.2 and the simulator's branches of 2024.
"""

from dataclasses import dataclass

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.training_search import WEIGHT_PARALLELS, TrainingSearchRequest
from foretoken.domain.units import GIB
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.search.internevo.question import list_points
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES, Strategies

MEMORY_LIMIT_BYTES = 80 * GIB
_ISP, _MSP = (WEIGHT_PARALLELS.index(name) for name in ("isp", "msp"))
_FULL = RECOMPUTE_MODES.index("full")
_DTYPE_BYTES = 2
_FP32_RATIO = 2
_FP32_BYTES = 4
# Master weights and the two moments of Adam; its update holds five of such a size at its peak.
_NUM_STATES, _NUM_STATES_AT_UPDATE = 3, 5
# Kept of a layer, in units of one byte per token and channel: all, and what `msp` keeps whole.
_KEPT, _KEPT_WHOLE = 118 / 3, 12 / 3
# Width of an MLP is rounded up to this.
_MULTIPLE = 256
# With replicas, embeddings have their states split in two under `isp`, whatever zo is.
_EMBEDDING_SHARDS = 2
# Layers whose gathered weights are held at once, for gathering and for reducing.
_GATHERED_LAYERS = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatorVerdicts:
    """What InternEvo's simulator says of each point; the masks are in the points' order.

    `is_divisible`: wp divides the ranks of a stage, and zo those that hold the same weights.
    `is_refused`: of those, what is refused for the micro batches of the first point,
    `first_micro_num`. `has_memory`: by its formula, of any point.
    """

    points: Strategies
    first_micro_num: int
    is_divisible: Flags
    is_refused: Flags
    has_memory: Flags

    @property
    def num_tried(self) -> int:
        """Return how many points it tries."""
        return len(self.points)

    @property
    def num_legal(self) -> int:
        """Return how many it says can run."""
        return int(np.count_nonzero(self.is_divisible & ~self.is_refused))

    @property
    def num_fitting(self) -> int:
        """Return how many it says can run and have the memory: the solutions it lists."""
        return int(np.count_nonzero(self.is_listed))

    @property
    def num_refused(self) -> int:
        """Return how many it refuses that can run."""
        return int(np.count_nonzero(self.is_refused))

    @property
    def num_fitting_unrefused(self) -> int:
        """Return how many can run and have the memory by its formula."""
        return int(np.count_nonzero(self.is_divisible & self.has_memory))

    @property
    def is_listed(self) -> Flags:
        """Return which points are among its solutions."""
        listed: Flags = self.is_divisible & ~self.is_refused & self.has_memory
        return listed

    def list_names(self) -> frozenset[str]:
        """Return the names of its solutions, as a search of the request has them."""
        return frozenset(self.points.names(np.flatnonzero(self.is_listed)))


def judge_by_simulator(request: TrainingSearchRequest) -> SimulatorVerdicts:
    """Return what InternEvo's simulator says of the points of a request from `build_request`.

    Raises:
        InvalidRequestError: it does not answer: the model has experts or latent attention, or the
            devices or key heads are an odd number.

    """
    model = request.scenario.model
    points = list_points(resolve_space(request).source, request.space)
    if model.moe is not None or model.mla is not None or model.layers:
        raise InvalidRequestError.of_field(
            "model",
            "InternEvo's simulator has no formula for experts, latent attention or patterns",
        )
    if model.num_kv_heads % 2 or np.any(points.num_devices % 2):
        raise InvalidRequestError.of_field(
            "model", "InternEvo's simulator stops at an odd number of key heads or devices"
        )
    is_divisible = _divides(points)
    first_micro_num = int(points.num_micro_batches[0]) if len(points) else 0
    is_refused = is_divisible & (points.pp == 1) & (points.num_micro_batches != first_micro_num)
    memory = measure_by_formula(points, model, request.scenario.sequence_length)
    return SimulatorVerdicts(
        points=points,
        first_micro_num=first_micro_num,
        is_divisible=is_divisible,
        is_refused=is_refused,
        has_memory=memory <= MEMORY_LIMIT_BYTES,
    )


def measure_by_formula(points: Strategies, model: ModelArchitecture, num_tokens: int) -> Floats:
    """Return the bytes of the first stage of each point by the simulator's formula.

    A sample has `num_tokens`.
    """
    parameters, states = _weights_and_states(points, model)
    at_update = parameters + states / _NUM_STATES * _NUM_STATES_AT_UPDATE
    gathered = np.where(
        points.weight_parallel == _ISP,
        _GATHERED_LAYERS * _DTYPE_BYTES * (4 * model.hidden**2 + 3 * model.hidden * _width(model)),
        0,
    )
    own_tokens = points.micro_batch_size * (num_tokens // points.tp)
    sent = np.where(points.pp > 1, _DTYPE_BYTES * own_tokens * model.hidden, 0)
    head_dim = model.hidden // model.num_heads
    rotary = _DTYPE_BYTES * (model.num_layers // points.pp) * num_tokens * head_dim
    in_passes = (
        parameters + states + _activations(points, model, num_tokens) + gathered + sent + rotary
    )
    memory: Floats = np.maximum(in_passes, at_update)
    return memory


def _divides(points: Strategies) -> Flags:
    num_ranks = points.num_devices // points.pp
    degree = np.where(points.weight_parallel == _ISP, points.weight_degree, points.tp)
    num_states = np.maximum(1, points.shard_degree)
    divides: Flags = (num_ranks % degree == 0) & (num_ranks // degree % num_states == 0)
    return divides


def _weights_and_states(points: Strategies, model: ModelArchitecture) -> tuple[Floats, Floats]:
    """Return the bytes of weights with gradients, and of optimizer states."""
    hidden = model.hidden
    key_width = hidden * model.num_kv_heads // model.num_heads
    layer = 2 * hidden + 2 * hidden**2 + 2 * hidden * key_width + 3 * hidden * _width(model)
    num_layers = -(-model.num_layers // points.pp)
    is_isp = points.weight_parallel == _ISP
    # Without a pipeline one stage has both the embedding and the head.
    num_tables = np.where(points.pp > 1, 1, 2)
    embedding = num_tables * model.vocab * hidden / points.tp
    blocks = num_layers * layer / np.where(is_isp, points.weight_degree, points.tp)
    num_states = np.maximum(1, points.shard_degree)
    embedding_shards = np.where(is_isp, np.where(points.dp > 1, _EMBEDDING_SHARDS, 1), num_states)
    states = blocks / num_states + embedding / embedding_shards
    return (
        2 * _DTYPE_BYTES * (blocks + embedding),
        _NUM_STATES * _FP32_RATIO * _DTYPE_BYTES * states,
    )


def _activations(points: Strategies, model: ModelArchitecture, num_tokens: int) -> Floats:
    """Return the bytes that the micro batches in flight keep, and of head and loss."""
    is_full = points.recompute == _FULL
    sp = points.tp
    channels = points.micro_batch_size * num_tokens * model.hidden
    whole = np.where(points.weight_parallel == _MSP, _KEPT_WHOLE, 0)
    kept = np.where(is_full, 0, channels * (whole + (_KEPT - whole) / sp) * model.num_layers)
    inputs = np.where(is_full, model.num_layers * (_DTYPE_BYTES * channels // sp), 0)
    norm = _FP32_BYTES * channels // sp
    head_input = np.where(points.weight_parallel == _MSP, 0, _DTYPE_BYTES * channels // sp)
    logits = points.micro_batch_size * _DTYPE_BYTES * num_tokens * model.vocab // sp
    head_gradient = 2 * _DTYPE_BYTES * channels
    weight_gradient = _DTYPE_BYTES * model.hidden * model.vocab / sp
    backward = head_gradient + head_gradient / sp + weight_gradient
    total: Floats = kept + inputs + norm + head_input + logits + backward
    return total


def _width(model: ModelArchitecture) -> int:
    """Return the width of an MLP, rounded up as InternEvo does."""
    return -(-model.intermediate // _MULTIPLE) * _MULTIPLE
