"""The operators a prediction counts are those that `transformers` runs."""

import json

import pytest
import torch
from closure_models import CONFIGS, config_json

from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.profiler.closure.hf_model import HuggingFaceModel, build_model, read_config
from foretoken.profiler.closure.measuring import OperatorRecorder
from foretoken.profiler.closure.step_program import make_program
from foretoken.simulator.validation.steps import count_kernels

pytest.importorskip("transformers")

_CPU = torch.device("cpu")
_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}


def _build(name: str, dtype: DType) -> HuggingFaceModel:
    return build_model(read_config(config_json(name), name), name, _DTYPES[dtype], _CPU)


def _seen(model: HuggingFaceModel, step: ClosureStep) -> int:
    run = make_program(model, step, _CPU, seed=0)
    run()
    with OperatorRecorder() as recorder:
        run()
    return len(recorder.calls)


def _counted(model: HuggingFaceModel, step: ClosureStep, dtype: DType) -> int:
    form = ModelForm(model_type=model.model_type, activation=model.activation)
    nodes = lower_step(step, model.architecture, dtype, form)
    return count_kernels(nodes, step, model.architecture, dtype)


@pytest.mark.parametrize("dtype", list(_DTYPES))
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_kernel_of_a_forward_pass_is_counted(name: str, kind: str, dtype: DType) -> None:
    """None is missing and none is too many."""
    model = _build(name, dtype)
    step = ClosureStep(kind=kind, batch_size=2, num_tokens=8)
    assert _seen(model, step) == _counted(model, step, dtype)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_nearly_every_kernel_of_a_training_step_is_counted(name: str) -> None:
    """A few sums and copies of autograd depend on the sizes."""
    model = _build(name, DType.FP32)
    step = ClosureStep(kind="training", batch_size=2, num_tokens=8)
    assert pytest.approx(_seen(model, step), rel=0.02) == _counted(model, step, DType.FP32)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_update_is_of_every_parameter_of_the_model(name: str) -> None:
    """Biases and norms are among them, and a tied table once."""
    model = _build(name, DType.FP32)
    form = ModelForm(model_type=model.model_type, activation=model.activation)
    step = ClosureStep(kind="training", batch_size=1, num_tokens=8)
    update = lower_step(step, model.architecture, DType.FP32, form)[-1]
    parameters = list(model.module.parameters())
    expected = {
        "num_params": sum(parameter.numel() for parameter in parameters),
        "num_tensors": len(parameters),
    }
    assert expected == dict(update.dims)


def test_dropout_is_off() -> None:
    """Also where a configuration requires it."""
    content = {**json.loads(config_json("gpt2")), "resid_pdrop": 0.5, "attn_pdrop": 0.5}
    module = build_model(content, "gpt2", torch.float32, _CPU).module
    dropouts = [part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)]
    assert dropouts
    assert {0.0} == set(dropouts)
