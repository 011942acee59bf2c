"""The steps to time where nobody says which: those that fit the device."""

from foretoken.domain.lowering.graph import BatchShape, PrefillShape
from foretoken.domain.lowering.lower import lower_forward
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.attention_prefill import prefill_dims

# Kind, sequences, tokens, mode. The first of each kind is the one a quick run takes.
_Row = tuple[str, int, int, str]
_CPU_STEPS: tuple[_Row, ...] = (
    ("prefill", 1, 128, "eager"),
    ("prefill", 1, 512, "eager"),
    ("prefill", 4, 256, "eager"),
    ("decode", 4, 256, "eager"),
    ("decode", 1, 512, "eager"),
    ("decode", 16, 256, "eager"),
    ("training", 1, 128, "eager"),
    ("training", 2, 256, "eager"),
)
_GPU_STEPS: tuple[_Row, ...] = (
    ("prefill", 1, 2048, "eager"),
    ("prefill", 1, 512, "eager"),
    ("prefill", 4, 2048, "eager"),
    ("prefill", 1, 8192, "eager"),
    ("prefill", 1, 2048, "compiled"),
    ("decode", 8, 1024, "graph"),
    ("decode", 1, 1024, "eager"),
    ("decode", 1, 1024, "graph"),
    ("decode", 32, 1024, "eager"),
    ("decode", 32, 1024, "graph"),
    ("decode", 64, 4096, "graph"),
    ("training", 1, 2048, "eager"),
    ("training", 4, 1024, "eager"),
    ("training", 4, 2048, "eager"),
)
# Weights, their gradients, and two moments in the same format.
_TRAINING_COPIES = 4
# Values of a layer that training keeps for each token, over its features: inputs of products, norms
# in fp32, heads, and three of the width of the MLP, about as Korthikanti et al. count them.
_KEPT_PER_FEATURE = 34
# Of the free memory; the rest is the allocator's and what this estimate leaves out.
_MEMORY_RATIO = 0.85


def choose_steps(
    model: ModelArchitecture,
    dtype: DType,
    memory_bytes: float,
    *,
    is_cuda: bool,
    is_quick: bool,
) -> tuple[ClosureStep, ...]:
    """Return the default steps that fit `memory_bytes` and the model's positions."""
    steps = [
        ClosureStep(kind=kind, batch_size=batch_size, num_tokens=num_tokens, mode=mode)
        for kind, batch_size, num_tokens, mode in (_GPU_STEPS if is_cuda else _CPU_STEPS)
    ]
    fitting = [
        step
        for step in steps
        if step.num_tokens < model.max_position
        and step_bytes(model, dtype, step) <= _MEMORY_RATIO * memory_bytes
    ]
    if not is_quick:
        return tuple(fitting)
    first = {step.kind: step for step in reversed(fitting)}
    return tuple(step for step in fitting if first[step.kind] is step)


def step_bytes(model: ModelArchitecture, dtype: DType, step: ClosureStep) -> float:
    """Return about how much memory a step takes, weights included."""
    shape = BatchShape(
        num_tokens=1, num_output_rows=1, prefill=PrefillShape(**prefill_dims(1, 1, 0))
    )
    nodes = lower_forward(model, shape, LoweringOptions(dtype=dtype))
    weights = dtype.num_bytes * float(sum(node.num_weights for node in nodes))
    tokens = step.batch_size * step.num_tokens
    if step.kind == "training":
        layers = _KEPT_PER_FEATURE * model.hidden * model.num_layers * dtype.num_bytes
        # Logits, in fp32 with their softmax and gradients.
        logits = model.vocab * (dtype.num_bytes + 3 * DType.FP32.num_bytes)
        return _TRAINING_COPIES * weights + tokens * (layers + logits)
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    # In a prompt, what one layer works on as well.
    work = 8 * max(model.hidden, model.intermediate) if step.kind == "prefill" else 0
    return weights + tokens * dtype.num_bytes * (kv + work)
