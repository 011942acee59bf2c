"""Plans for models hold exactly what the lowering requests and what `transformers` runs."""

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, PrefillShape, RankContext
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.models.architecture import all_models, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.profiler.planning.model_sweep import (
    FULL_GRID,
    QUICK_GRID,
    BatchGrid,
    ModelCalls,
    ModelSweep,
    collect_calls,
    serving_options,
)

LLAMA = find_model("llama-3.1-8b")


def sweep(grid: BatchGrid = QUICK_GRID, **changes: object) -> ModelCalls:
    asked = {"models": (LLAMA,), "tp_sizes": (1,), "dtypes": (DType.BF16,), **changes}
    return collect_calls(ModelSweep(grid=grid, **asked))  # type: ignore[arg-type]


def keys(calls: ModelCalls) -> set[tuple[object, ...]]:
    return set(calls.calls)


def of_operator(calls: ModelCalls, operator: str) -> list[OperatorCall]:
    return [call for call in calls.calls.values() if call.operator == operator]


@pytest.mark.parametrize("tp", [1, 4])
def test_step_on_the_grid_asks_for_nothing_that_is_not_planned(tp: int) -> None:
    """A step of prefills or of decoding sequences with the grid's numbers is all known."""
    planned = keys(sweep(tp_sizes=(tp,)))
    rank = RankContext(model=LLAMA, layout=ParallelLayout(tp=tp), devices_per_node=8)
    prefill = PrefillShape(**prefill_dims(1, 512, 0))
    decode = DecodeShape(num_seqs=64, kv_tokens=64 * 1024, kv_tokens_max=1024)
    steps = (
        BatchShape(num_tokens=512, num_output_rows=1, prefill=prefill),
        BatchShape(num_tokens=64, num_output_rows=64, decode=decode),
    )
    for shape in steps:
        asked = ModelCalls()
        for node in lower_rank(shape, serving_options(DType.BF16), rank):
            if not find_operator(node.operator).is_collective:
                asked.add(node)
        assert keys(asked) <= planned


def test_every_call_is_legal_and_there_once() -> None:
    found = sweep(FULL_GRID, tp_sizes=(1, 8), has_training=True)
    for call in found.calls.values():
        find_operator(call.operator).check_dims(call.dims)
    assert found.left_out == {}


def test_serving_alone_has_no_backward_pass_and_training_has() -> None:
    serving, training = sweep(), sweep(has_training=True)
    assert {call.phase for call in serving.calls.values()} == {Phase.FORWARD}
    assert keys(serving) < keys(training)
    backward = {c.operator for c in training.calls.values() if c.phase is Phase.BACKWARD}
    assert {"gemm", "attention_prefill", "cross_entropy"} <= backward
    assert of_operator(training, "adam")


def test_shards_share_what_tensor_parallelism_leaves_whole() -> None:
    one, two = sweep(tp_sizes=(1,)), sweep(tp_sizes=(2,))
    both = sweep(tp_sizes=(1, 2))
    assert keys(both) == keys(one) | keys(two)
    assert {c.dims["hidden"] for c in of_operator(both, "add_rms_norm")} == {LLAMA.hidden}


def test_contexts_stay_within_the_models_own() -> None:
    small = find_model("tiny-llama")
    for call in of_operator(sweep(FULL_GRID, models=(small,)), "attention_decode"):
        assert call.dims["kv_tokens_max"] <= small.max_position


def test_layout_that_does_not_fit_is_left_out_with_the_reason() -> None:
    """gpt2-xl has 25 heads."""
    odd = find_model("gpt2-xl")
    found = sweep(models=(odd,), tp_sizes=(1, 8))
    (reason,) = found.left_out
    assert reason.startswith("gpt2-xl tp 8: ")
    with pytest.raises(InvalidRequestError, match="25 heads"):
        sweep(models=(odd,), tp_sizes=(8,))


def test_stored_formats_change_the_products_and_not_the_rest() -> None:
    found = sweep(dtypes=(DType.FP8,))
    assert DType.FP8 in {call.dtype for call in of_operator(found, "gemm")}
    assert {call.dtype for call in of_operator(found, "rope")} == {DType.BF16}


@pytest.mark.parametrize("name", sorted(all_models()))
def test_every_preset_can_be_planned(name: str) -> None:
    assert sweep(models=(find_model(name),)).calls


_LLAMA = find_model("tiny-llama")
# A whole model's update is timed at other sizes.
_UPDATE = "fused_adam"


def _keys(found: ModelCalls) -> set[object]:
    return {key for key, call in found.calls.items() if call.operator != _UPDATE}


def _sweep(*, has_training: bool, tp: int = 1) -> ModelCalls:
    return collect_calls(
        ModelSweep(
            models=(_LLAMA,),
            tp_sizes=(tp,),
            dtypes=(DType.BF16,),
            grid=QUICK_GRID,
            has_training=has_training,
        )
    )


@pytest.mark.parametrize(
    ("kind", "batch_size", "num_tokens"),
    [("prefill", 1, 512), ("decode", 16, 1023), ("training", 2, 2048)],
)
def test_steps_of_the_grid_are_all_known(kind: str, batch_size: int, num_tokens: int) -> None:
    """What validating such a step needs is in the plan of a model's training."""
    asked = ModelCalls()
    step = ClosureStep(kind=kind, batch_size=batch_size, num_tokens=num_tokens)
    for node in lower_step(step, _LLAMA, DType.BF16, ModelForm()):
        asked.add(node)
    assert _keys(asked) <= _keys(_sweep(has_training=True))


def test_the_optimizers_update_comes_in_sizes_that_fit() -> None:
    """As many tensors as the model has; never more of them than parameters."""
    calls = [c for c in _sweep(has_training=True).calls.values() if c.operator == _UPDATE]
    whole = [call.dims for call in calls if call.dims["num_tensors"] > 1]
    assert {dims["num_params"] for dims in whole} == set(QUICK_GRID.num_params)


def _eager_operators(found: ModelCalls) -> set[str]:
    return {call.operator for call in found.calls.values() if call.variant == "form=eager"}


def test_serving_asks_for_no_chains() -> None:
    assert not _eager_operators(_sweep(has_training=False))


def test_trainers_that_run_chains_ask_for_them_in_every_cut() -> None:
    """torchtitan, which is not compiled, whatever the tensor parallel degree."""
    chains = {"rms_norm", "rope"}
    assert chains <= _eager_operators(_sweep(has_training=True, tp=2))
