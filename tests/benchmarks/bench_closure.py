"""Whole steps of small Hugging Face models on this CPU, compared with predicted ones.

Run: python tests/benchmarks/bench_closure.py [--home FOLDER] [--sweep]

Times the operators that the steps consist of, the host, and the steps, each by Foretoken's own
profiler; trains; predicts. Nothing is fitted to a step. With `--sweep` the predictor learns from
the sweep of the models' shapes instead of the very calls, as a user's would. A `--home` is kept:
what it has measured is not measured again. Takes a few minutes; other work meanwhile shows.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.app.compose import Composition
from foretoken.app.config import load_config
from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.profiling import ClosureRequest, ClosureStep, ProfileRequest
from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.host.measuring import measure_host
from foretoken.profiler.local_device import find_local_device
from foretoken.simulator.validation.steps import StepsValidation, validate_steps

_DEVICE, _DTYPE = "cpu", DType.FP32
_STEPS = tuple(
    ClosureStep(kind=kind, batch_size=batch_size, num_tokens=num_tokens)
    for kind, batch_size, num_tokens in (
        ("prefill", 1, 128),
        ("prefill", 4, 128),
        ("decode", 1, 256),
        ("decode", 16, 256),
        ("training", 1, 128),
        ("training", 4, 64),
    )
)
# Small members of three families: no published model has just these sizes.
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "small-llama": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
        "vocab_size": 8000,
        "max_position_embeddings": 2048,
    },
    "small-qwen3": {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 2048,
        "vocab_size": 16000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "small-gpt2": {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 8000,
        "n_positions": 1024,
        "activation_function": "gelu_new",
    },
}


def main() -> None:
    """Measure what the home lacks, predict, and print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="folder to keep; a temporary one if left out")
    parser.add_argument("--sweep", action="store_true", help="learn from sweeps of the shapes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = arguments.home or Path(scratch)
        config = load_config(None, {}, {"home": str(home)})
        with Composition(config) as services:
            _profile(services, uses_sweep=arguments.sweep)
            services.foretoken("predictor").train(TrainRequest())
            validations = [_validate(services, name, content) for name, content in _MODELS.items()]
    _print(validations)


def _profile(services: Composition, *, uses_sweep: bool) -> None:
    foretoken = services.foretoken("profiler")
    if uses_sweep:
        models = tuple(architecture_of_hf_config(item, name) for name, item in _MODELS.items())
        request = ProfileRequest(
            device=_DEVICE, models=models, has_training=True, dtypes=(_DTYPE,), quick=True
        )
    else:
        request = ProfileRequest(device=_DEVICE, calls=tuple(_calls()), quick=True)
    report = foretoken.profile(request)
    sys.stdout.write(
        f"{report.num_measured} operator calls in {report.wall_s:.0f} s, {report.num_failed}"
        f" failed, {report.num_flagged} flagged, {report.num_skipped} known\n"
    )
    kept = [run.run.run_id for run in services.catalog.list_runs()]
    if not any(run_id.startswith(f"host-{_DEVICE}-") for run_id in kept):
        progress = JobProgress(lambda *_: None, threading.Event())
        host = measure_host(
            find_local_device(_DEVICE), services.catalog, progress, quick=False, num_threads=0
        )
        sys.stdout.write(f"{host.num_rows} times of the host in {host.wall_s:.0f} s\n")


def _calls() -> Iterator[OperatorCall]:
    """Yield every operator call of the steps once."""
    seen = set()
    for name, content in _MODELS.items():
        model = architecture_of_hf_config(content, name)
        for step in _STEPS:
            for node in lower_step(step, model, _DTYPE, _form(content)):
                call = node.call
                key = (call.operator, call.phase, call.variant, tuple(sorted(call.dims.items())))
                if key not in seen:
                    seen.add(key)
                    yield call


def _form(content: Mapping[str, Any]) -> ModelForm:
    activation = str(content.get("activation_function", content.get("hidden_act", "")))
    return ModelForm(model_type=content["model_type"], activation=activation)


def _validate(services: Composition, name: str, content: Mapping[str, Any]) -> StepsValidation:
    request = ClosureRequest(
        device=_DEVICE,
        model=name,
        config_json=json.dumps(content),
        steps=_STEPS,
        dtype=_DTYPE,
        quick=True,
    )
    report = services.foretoken("profiler").measure_closure(request)
    return validate_steps(report, services.predictor)


def _print(validations: Sequence[StepsValidation]) -> None:
    layout = "{:<12} {:<17} {:>9} {:>9} {:>7} {:>8} {:>9} {:>8}  {}\n"
    names = ("model", "step", "P10 (ms)", "median", "spread", "sum", "predicted", "error")
    sys.stdout.write(layout.format(*names, "most of it"))
    for validation in validations:
        for step in validation.steps:
            taken = step.measured
            largest = ", ".join(
                f"{part.name} {part.latency_us / step.predicted_us:.0%}" for part in step.parts[:4]
            )
            spread = taken.latency_us_p90 / taken.latency_us_p10 - 1
            sys.stdout.write(
                layout.format(
                    validation.model,
                    f"{taken.step.kind} {taken.step.batch_size}x{taken.step.num_tokens}",
                    f"{taken.latency_us_p10 / 1e3:.2f}",
                    f"{taken.latency_us_median / 1e3:.2f}",
                    f"{spread:.0%}",
                    f"{step.operators_us / 1e3:.2f}",
                    f"{step.predicted_us / 1e3:.2f}",
                    f"{step.error_ratio:+.1%}",
                    f"{largest} (kernels {step.num_kernels}, seen {taken.num_kernels})",
                )
            )
        for text in validation.notes:
            sys.stdout.write(f"  {validation.model}: {text}\n")
    errors = [abs(step.error_ratio) for item in validations for step in item.steps]
    if errors:
        sys.stdout.write(
            f"{len(errors)} steps: error median {statistics.median(errors):.1%}, mean"
            f" {statistics.fmean(errors):.1%}, largest {max(errors):.1%}\n"
        )


if __name__ == "__main__":
    main()
