"""What a model's sweep holds of `transformers` running it."""

import pytest

from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.models.architecture import find_model
from foretoken.profiler.planning.model_sweep import (
    QUICK_GRID,
    ModelCalls,
    ModelSweep,
    collect_calls,
)

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


@pytest.mark.parametrize(("has_training", "tp"), [(False, 1), (True, 2)])
def test_serving_and_other_cuts_ask_for_none_of_it(has_training: bool, tp: int) -> None:
    found = _sweep(has_training=has_training, tp=tp)
    assert not [call for call in found.calls.values() if call.variant == "form=eager"]
