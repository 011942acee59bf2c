"""The measured training step that is most like an answer's."""

from dataclasses import replace

import pytest

from foretoken.domain.hardware.device import find_device
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    StrategyColumns,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.echo import echo_training, echo_training_search
from foretoken.simulator.validation.published_step import (
    AskedStep,
    PublishedStep,
    find_nearest_step,
    read_published_steps,
)

_STEP = PublishedStep(
    model="llama-3-70b",
    device="h100_sxm",
    dtype="bf16",
    sequence_length=8192,
    num_devices=64,
    global_batch_size=128,
    tp=4,
    pp=4,
    cp=2,
    ep=1,
    framework="megatron-core",
    tokens_per_s_per_gpu=800.0,
    source="somebody's table",
)
_ASKED = AskedStep(
    model=find_model("llama-3-70b"),
    device="h100_sxm",
    dtype="fp8",
    sequence_length=8192,
    num_devices=64,
    layout=ParallelLayout(tp=4, pp=4, dp=2, cp=2),
)


def test_the_format_counts_before_lengths_devices_and_layout() -> None:
    in_8_bit = replace(_STEP, dtype="mxfp8", sequence_length=4096, num_devices=512, tp=1)
    assert in_8_bit is find_nearest_step([_STEP, in_8_bit], _ASKED)
    asked = replace(_ASKED, dtype="bf16")
    assert _STEP is find_nearest_step([in_8_bit, _STEP], asked)
    more = replace(_STEP, num_devices=1024)
    assert _STEP is find_nearest_step([more, _STEP], asked)
    other = replace(_STEP, tp=8, cp=1)
    assert _STEP is find_nearest_step([other, _STEP], asked)


@pytest.mark.parametrize(
    "changes", [{"device": "b200"}, {"model": "llama-3-8b"}, {"sequence_length": 1024}]
)
def test_another_device_model_or_workload_is_not_alike(changes: dict[str, str]) -> None:
    assert find_nearest_step([replace(_STEP, **changes)], _ASKED) is None


def test_a_model_of_another_name_with_the_same_layers_is_alike() -> None:
    asked = replace(_ASKED, model=find_model("llama-3.1-70b"))
    assert _STEP is find_nearest_step([_STEP], asked)
    smaller = replace(asked.model, num_layers=40)
    assert find_nearest_step([_STEP], replace(asked, model=smaller)) is None


def test_a_step_says_what_it_is_and_where_it_stands() -> None:
    assert (
        "800 tokens/s per GPU: llama-3-70b in bf16 on 64 h100_sxm, tp4 pp4 cp2, 128 sequences of"
        " 8,192 tokens, megatron-core (somebody's table)"
    ) == _STEP.describe()
    plain = replace(_STEP, tp=1, pp=1, cp=1, global_batch_size=0)
    assert "dp alone, sequences of 8,192 tokens" in plain.describe()


_SCENARIO = TrainingScenario(
    name="step",
    model=find_model("llama-3-8b"),
    device="h100_sxm",
    layout=ParallelLayout(dp=8),
    sequence_length=8192,
    global_batch_size=128,
)
_TIMED = {"analytical": 1.0}


def test_answers_name_it_where_a_time_was_predicted() -> None:
    report = TrainingReport(step_time_ratio_by_provenance=_TIMED)
    (remark,) = echo_training(_SCENARIO, report).echo.remarks
    assert remark.startswith("nearest measured step: ")
    assert "llama-3-8b in bf16 on 8 h100_sxm" in remark
    assert () == echo_training(_SCENARIO, TrainingReport()).echo.remarks
    assert () == echo_training(replace(_SCENARIO, device="l4"), report).echo.remarks


def test_a_search_names_that_of_its_best() -> None:
    request = TrainingSearchRequest(scenario=_SCENARIO)
    columns = StrategyColumns(
        name=("a", "b"),
        device=("l4", "gb200"),
        **dict.fromkeys(("tp", "pp", "cp", "ep"), (1, 1)),
        dp=(8, 8),
        num_devices=(8, 8),
    )
    report = TrainingSearchReport(
        candidates=columns,
        best={request.objective: "b"},
        echo=Echo.of_estimate("b", _TIMED),
    )
    (remark,) = echo_training_search(request, report).echo.remarks
    assert "llama-3-8b" in remark
    assert "gb200" in remark
    other = replace(report, best={request.objective: "a"})
    assert () == echo_training_search(request, other).echo.remarks


def test_every_step_of_the_file_is_of_a_preset_on_a_device_that_is_known() -> None:
    steps = read_published_steps()
    assert len(steps) == len(set(steps))
    for step in steps:
        assert find_model(step.model).name == step.model
        assert find_device(step.device).name == step.device
        assert step.source
        assert 0 == step.num_devices % (step.tp * step.pp * step.cp)
        # No GPU does a hundred thousand tokens of such models in a second.
        assert 1 < step.tokens_per_s_per_gpu < 1e5
