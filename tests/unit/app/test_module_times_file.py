"""Files that a training scenario names: profiles of modules, a calibration."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken.app.module_times_file import read_module_times
from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.training_truth import (
    ModuleTime,
    ModuleTimes,
    TrainingCalibration,
)

_COLUMNS = (
    *("embed", "attn_q", "attn_k", "attn_v", "attn_o"),
    *("mlp_gate", "mlp_act_fn", "mlp_up", "mlp_down", "lm_head"),
)
_MODULES = (
    *("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "self_attn_o_proj"),
    *("mlp_gate_proj", "mlp_act_fn", "mlp_up_proj", "mlp_down_proj"),
)


def _profile(num_layers: int = 8, **config: object) -> dict[str, Any]:
    """Return a profile JSON of two ranks, whose times in ms are 1 and 3 in every module."""
    return {
        "config": {
            "model_name": "meta-llama/Llama-3.2-1B",
            "num_layers": num_layers,
            "micro_batch_size": 4,
            "tp_size": 2,
            **config,
        },
        "combined_timing": {
            "embedding": {"mean_ms": 9.0, "median_ms": 0.5, "count": 1},
            "modules": [
                {"name": f"model_layers_{layer}_{module}", "mean_ms": 9.0, "median_ms": time_ms}
                for layer in range(num_layers)
                for module in _MODULES
                for time_ms in (1.0, 3.0)
            ],
            "lm_head": {"mean_ms": 9.0, "median_ms": 2.0, "count": 1},
        },
    }


def test_a_table_has_a_row_for_each_micro_batch(tmp_path: Path) -> None:
    path = tmp_path / "llama1b_A100_2.npz"
    np.savez(path, data=np.arange(20.0).reshape(2, 10))
    found = read_module_times(path, {"sequence_length": 120, "dtype": "fp32"})
    assert found == ModuleTimes(
        source="llama1b_A100_2.npz",
        model="llama-3.2-1b",
        device="a100_sxm_40",
        tp=2,
        sequence_length=120,
        dtype=DType.FP32,
        has_communication=True,
        measures="intervals",
        times=tuple(
            ModuleTime(
                module=name,
                micro_batch_size=2**row,
                forward_us=1e3 * (10 * row + place),
                is_whole=name == "lm_head",
            )
            for row in range(2)
            for place, name in enumerate(_COLUMNS)
        ),
    )


def test_what_a_file_says_of_itself_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "llama1b_A100_1.npz"
    np.savez(path, data=np.ones((1, 10)))
    found = read_module_times(path, {"device": "a100_sxm_80"})
    assert (found.device, found.has_communication) == ("a100_sxm_80", False)


def test_a_legacy_profile_has_embedding_layers_and_head(tmp_path: Path) -> None:
    path = tmp_path / "gpt2XL_A100_1.npy"
    np.save(path, np.array([1.0, 2.0, 3.0, 4.0]))
    found = read_module_times(path, {})
    assert found.model == "gpt2-xl"
    assert [(time.module, time.layer, time.forward_us) for time in found.times] == [
        ("embedding_layer", -1, 1e3),
        ("transformer_layer", 0, 2e3),
        ("transformer_layer", 1, 3e3),
        ("post_process", -1, 4e3),
    ]


@pytest.mark.parametrize(("num_layers", "layers"), [(8, {-1}), (16, set(range(16)))])
def test_a_profile_is_the_mean_over_ranks_of_medians(
    tmp_path: Path, num_layers: int, layers: set[int]
) -> None:
    """The layers of a shortened model stand for all of the whole one."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(_profile(num_layers)))
    found = read_module_times(path, {})
    assert (found.model, found.device, found.tp) == ("llama-3.2-1b", "", 2)
    in_layers = [time for time in found.times if time.module not in ("embed", "lm_head")]
    assert {time.layer for time in in_layers} == layers
    assert {(time.forward_us, time.micro_batch_size) for time in in_layers} == {(2e3, 4)}
    assert len(found.times) == num_layers * 8 + 2
    assert found.times[-1].forward_us == 2e3


def test_a_profile_of_ones_own_is_read_from_yaml_and_json(tmp_path: Path) -> None:
    content = {"tp": 2, "times": [{"module": "mlp", "micro_batch_size": 1, "forward_us": 3}]}
    expected = (ModuleTime(module="mlp", micro_batch_size=1, forward_us=3.0),)
    for name in ("own.yaml", "own.json"):
        (tmp_path / name).write_text(json.dumps(content))
        found = read_module_times(tmp_path / name, {})
        assert (found.source, found.tp, found.times) == (name, 2, expected)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("own.yaml", {"times": [], "tp": 0}, "tp"),
        ("own.yaml", {"time": []}, "unknown key"),
        ("own.json", [], "no mapping"),
        ("own.txt", {}, "a .npz, .npy, .json or .yaml file"),
        ("p.json", {"config": {}, "combined_timing": {}}, "config.num_layers"),
        ("p.json", {**_profile(), "combined_timing": {"modules": 1}}, "modules is no list"),
        (
            "p.json",
            {**_profile(), "combined_timing": {"modules": [{"name": "vision"}]}},
            "'vision' is no module of a layer",
        ),
        (
            "p.json",
            {
                **_profile(),
                "combined_timing": {"modules": [{"name": "model_layers_0_mlp_up_proj"}]},
            },
            "median_ms: None is not a number",
        ),
    ],
)
def test_what_cannot_be_used_says_why(
    tmp_path: Path, name: str, content: object, reason: str
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match=reason):
        read_module_times(path, {})


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("llama1b_A100_2.npz", np.ones((2, 9)), "an array of shape"),
        ("llama1b_A100_2.npz", np.full((1, 10), np.nan), "must be finite"),
        ("llama1b_A100_2.npz", np.full((1, 10), "x"), "not of numbers"),
        ("profile.npz", np.ones((1, 10)), "is not named"),
        ("gpt2XL_A100_1.npy", np.ones(2), "not embedding, layers and head"),
    ],
)
def test_an_array_that_is_no_profile_is_refused(
    tmp_path: Path, name: str, data: np.ndarray[Any, Any], reason: str
) -> None:
    path = tmp_path / name
    if name.endswith("npz"):
        np.savez(path, data=data)
    else:
        np.save(path, data)
    with pytest.raises(InvalidRequestError, match=reason):
        read_module_times(path, {})


def test_a_scenario_names_both_files_relative_to_itself(tmp_path: Path) -> None:
    np.savez(tmp_path / "llama1b_A100_1.npz", data=np.ones((1, 10)))
    (tmp_path / "learned.yaml").write_text("forward_gap_us: 500\nbackward_gap_us: 900\n")
    path = tmp_path / "s.yaml"
    path.write_text(
        "model: llama-3.2-1b\ndevice: a100_sxm_40\ncalibration: learned.yaml\n"
        "module_times: {file: llama1b_A100_1.npz, sequence_length: 4096}\n"
    )
    scenario = read_training_scenario(path, {})
    assert scenario.calibration == TrainingCalibration(forward_gap_us=500, backward_gap_us=900)
    assert scenario.module_times is not None
    assert scenario.module_times.sequence_length == 4096
    changed = read_training_scenario(path, {"module_times": "llama1b_A100_1.npz"})
    assert changed.module_times is not None
    assert changed.module_times.sequence_length == 0
