"""`foretoken profile closure`: whole steps of a model, measured to hold predictions to."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.option_group import with_option_groups
from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    note,
    open_composition,
    show_progress,
    state_of,
)
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import (
    DISTURBED_KEY,
    STEP_KINDS,
    STEP_MODES,
    ClosureReport,
    ClosureRequest,
    ClosureStep,
    MeasuredStep,
)
from foretoken.domain.models.architecture import find_model
from foretoken.domain.text_file import is_there, read_text
from foretoken.domain.units import GIB, US_PER_MS
from foretoken.profiler.closure.hf_config import config_of_architecture

_CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class ClosureEffort:
    """How much is timed."""

    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer steps and fewer samples of each.")
    ] = False
    time_cap_s: Annotated[
        float,
        typer.Option(
            min=0.0, help="Begin no step after this many seconds; those left are named (0: no cap)."
        ),
    ] = 0.0


@with_option_groups
def closure(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A model's `config.json` or its folder, or a preset's name.")
    ],
    effort: ClosureEffort,
    device: Annotated[
        str, typer.Option(help="Device of this machine, by its catalog name: `cpu`, `h200_sxm`.")
    ] = _CPU,
    step: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND:SEQUENCESxTOKENS[:MODE], such as `prefill:1x512`, `decode:8x1024:graph`,"
            " `training:2x256:compiled`. Repeatable; some that fit the device if left out."
        ),
    ] = None,
    num_layers: Annotated[
        int, typer.Option("--layers", help="Build so many layers only (0: as many as it has).")
    ] = 0,
    dtype: Annotated[
        str, typer.Option(help="Number format; fp32 on a CPU and bf16 elsewhere if left out.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the report here as JSON, too.", callback=check_output_path),
    ] = None,
) -> None:
    """Time whole steps of a Hugging Face model with random weights; nothing is downloaded.

    A prefill computes `SEQUENCES` prompts of `TOKENS`, a decoding step one token more for each of
    them after a context of `TOKENS`, a training step a forward and backward pass and the update by
    AdamW. The times are kept apart from measurements of operators: predictors never learn from
    them. `foretoken validate steps` holds predictions to them.

    Example: `foretoken profile closure config.json --step prefill:1x512 --step decode:8x1024`
    """
    state = state_of(context)
    with open_composition(state) as services:
        name, config_json = read_model_config(model)
        request = ClosureRequest(
            device=device,
            model=name,
            config_json=config_json,
            steps=tuple(parse_step(word) for word in step or ()),
            num_layers=num_layers,
            dtype=parse_dtype(dtype, device),
            quick=effort.quick,
            time_cap_s=effort.time_cap_s,
        )
        with show_progress(f"time steps of {name}") as update:
            report = services.foretoken("profiler").measure_closure(request, on_progress=update)
        state.print_object(report, lambda: closure_table(report))
        if out is not None:
            out.write_text(json.dumps(schema.encode(report), indent=1), encoding="utf-8")
            note(f"report written to {out}")
        note(f"kept in the catalog; compare: foretoken validate steps {report.name}")


def parse_step(word: str) -> ClosureStep:
    """Return the step that `decode:8x1024:graph` says.

    Raises:
        InvalidRequestError: it does not say one.

    """
    kind, _, rest = word.partition(":")
    shape, _, mode = rest.partition(":")
    batch_size, _, num_tokens = shape.partition("x")
    if not (batch_size.isdecimal() and num_tokens.isdecimal()):
        raise InvalidRequestError.of_field(
            "step",
            f"{word!r} is not KIND:SEQUENCESxTOKENS[:MODE], such as decode:8x1024; kinds are"
            f" {', '.join(STEP_KINDS)}, modes {', '.join(STEP_MODES)}",
        )
    return ClosureStep(
        kind=kind,
        batch_size=int(batch_size),
        num_tokens=int(num_tokens),
        mode=mode or STEP_MODES[0],
    )


def parse_dtype(name: str, device: str) -> DType:
    """Return the number format of that name, the usual one of the device where there is none.

    Raises:
        InvalidRequestError: there is no such format.

    """
    if not name:
        return DType.FP32 if device == _CPU else DType.BF16
    if name.upper() not in DType.__members__:
        names = ", ".join(member.lower() for member in DType.__members__)
        raise InvalidRequestError.of_field("dtype", f"{name!r} is not one of {names}")
    return DType[name.upper()]


def read_model_config(name_or_path: str) -> tuple[str, str]:
    """Return a model's name and the text of its `config.json`, which a preset has none of.

    A preset wins over a folder of the same name; `./name` is always the folder.

    Raises:
        UnknownModelError: neither a preset nor a path.
        InvalidRequestError: the file cannot be read.

    """
    try:
        preset = find_model(name_or_path)
    except UnknownModelError:
        path = Path(name_or_path)
        if not is_there(path):
            raise
    else:
        return preset.name, json.dumps(config_of_architecture(preset))
    file = path / "config.json" if path.is_dir() else path
    text = read_text(file, "model")
    return (file.resolve().parent.name if file.name == "config.json" else file.stem), text


def closure_table(report: ClosureReport) -> Table:
    """Return a report for a terminal: the steps that were measured, and why others were not."""
    measured = [step for step in report.steps if step.status == "ok"]
    failed = [step for step in report.steps if step.status != "ok"]
    layers = f"{report.architecture.num_layers} layers, " if report.architecture else ""
    title = (
        f"{report.model} on {report.device} ({layers}{report.dtype.name.lower()},"
        f" {report.framework})"
    )
    has_device = any(step.device_us for step in measured)
    columns: tuple[str, ...] = ("step", "median (ms)", "P10 to P90 (ms)", "samples", "kernels")
    if has_device:
        columns += ("device (ms)", "host (ms)", "memory (GiB)")
    parts: list[Table | str] = [
        build_table(title, columns, [_row(step, has_device=has_device) for step in measured])
    ]
    if failed:
        rows = [(step_name(item.step), item.reason) for item in failed]
        parts.append(build_table("Not measured", ("step", "reason"), rows))
    disturbed = report.environment.get(DISTURBED_KEY, "")
    return stack(*parts, *((f"disturbed: {disturbed}",) if disturbed else ()))


def step_name(step: ClosureStep) -> str:
    """Return a step as the option names it."""
    mode = "" if step.mode == STEP_MODES[0] else f":{step.mode}"
    return f"{step.kind}:{step.batch_size}x{step.num_tokens}{mode}"


def _row(step: MeasuredStep, *, has_device: bool) -> Sequence[object]:
    spread = f"{step.latency_us_p10 / US_PER_MS:.4g} to {step.latency_us_p90 / US_PER_MS:.4g}"
    row: tuple[object, ...] = (
        step_name(step.step),
        step.latency_us_median / US_PER_MS,
        spread,
        step.num_samples,
        step.num_kernels or "-",
    )
    if not has_device:
        return row
    memory_gib = step.memory_bytes / GIB
    return (*row, step.device_us / US_PER_MS, step.host_us / US_PER_MS, memory_gib)
