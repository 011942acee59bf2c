"""`foretoken profile closure` and `graph`: whole steps of a model, and the modules of its graph."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from foretoken.app.cli.request_options import Answers, OptionsOf, with_option_groups
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    note,
    open_services,
    scenario_changes,
    show_progress,
    stack,
)
from foretoken.catalog.dims import Floats
from foretoken.catalog.exporters.fasop.table import TableKey
from foretoken.catalog.importers.fasop.profile_rows import COLUMNS
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
    GraphReport,
    GraphRequest,
    MeasuredStep,
)
from foretoken.domain.measurements.training_truth import ModuleTime, ModuleTimes
from foretoken.domain.models.architecture import find_model
from foretoken.domain.name import path_inside, text_to_name
from foretoken.domain.text_file import is_there, read_text
from foretoken.domain.units import GIB, US_PER_MS
from foretoken.profiler.closure.hf_config import config_of_architecture

_CPU = "cpu"
# FASOP's columns that are parts of a projection which some models fuse.
_QKV = ("attn_q", "attn_k", "attn_v")
_GATE_UP = ("mlp_gate", "mlp_up")
_FUSED = {"qkv_proj": _QKV, "gate_up_proj": _GATE_UP}
# What a model may not have, or does inside of the next module: nothing is added to a step.
_OPTIONAL = frozenset(("mlp_gate", "mlp_act_fn"))


@with_option_groups
def closure(
    context: typer.Context,
    answers: Annotated[Answers, OptionsOf(ClosureRequest, defaults={"device": _CPU})],
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
    with open_services(context) as (state, services):
        request = ClosureRequest(**_of_model(answers))
        with show_progress(f"time steps of {request.model}") as update:
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


def read_steps(_: str, words: Sequence[str]) -> tuple[ClosureStep, ...]:
    """Return the steps that an option's words say."""
    return tuple(parse_step(word) for word in words)


def _of_model(answers: Answers) -> dict[str, Any]:
    """Return what was given, with the model's `config.json` and the usual number format."""
    given = answers.read()
    name, config_json = read_model_config(given["model"])
    usual = DType.FP32 if given["device"] == _CPU else DType.BF16
    return {"dtype": usual, **given, "model": name, "config_json": config_json}


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


@with_option_groups
def graph(
    context: typer.Context,
    answers: Annotated[Answers, OptionsOf(GraphRequest, defaults={"device": _CPU})],
    out: Annotated[
        Path | None,
        typer.Option(help="Write FASOP's tables (.npz) and profiles for scenarios (.json) here."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="`num_layers=8` (0: as many as fit), `micro_batch_size_max=4`,"
            " `has_backward=false`, `time_cap_s=60`, `seed=1`. Repeatable.",
        ),
    ] = None,
) -> None:
    """Trace a Hugging Face model with random weights and time its modules; nothing is downloaded.

    Every different call of the graph is timed alone, forward and backward, for micro batches of 1,
    2, 4, ... samples until the memory is full, and folded to FASOP's modules. A model that does not
    fit is shortened, its other layers taken to be like the first. Calls that are operators of ours
    become measurements in the catalog.

    Example: `foretoken profile graph config.json --seq-len 512 --tp 1,2 --out profiles`
    """
    with open_services(context) as (state, services):
        facts = {**_of_model(answers), **scenario_changes(change)}
        request = schema.decode(GraphRequest, facts, "graph profile")
        with show_progress(f"profile the graph of {request.model}") as update:
            report = services.foretoken("profiler").profile_graph(request, on_progress=update)
        state.print_object(report, lambda: graph_table(report))
        _write_out(report, request.config_json, out)


def _write_out(report: GraphReport, config_json: str, folder: Path | None) -> None:
    """Write the files, where a folder was given; end with a status where there is nothing."""
    if not report.profiles:
        note("nothing was timed: the notes say why")
        raise typer.Exit(code=1)
    if folder is not None:
        for line in write_profiles(report, json.loads(config_json), folder):
            note(line)


def graph_table(report: GraphReport) -> Table:
    """Return the times of modules by micro batch size, and the notes."""
    tables = [_times_table(report, profile) for profile in report.profiles]
    summary = build_table(
        f"Graph of {report.model} on {report.device}",
        ("layers", "timed", "calls", "seconds", "run"),
        [
            (
                report.num_layers,
                report.num_layers_timed,
                report.num_nodes,
                report.wall_s,
                report.run_id,
            )
        ],
    )
    return stack(summary, *tables, *(f"- {line}" for line in report.notes))


def _times_table(report: GraphReport, profile: ModuleTimes) -> Table:
    sizes = sorted({item.micro_batch_size for item in profile.times})
    cells = {(item.module, item.layer, item.micro_batch_size): item for item in profile.times}
    modules = list(dict.fromkeys((item.module, item.layer) for item in profile.times))
    rows = [
        (
            module,
            _layer_text(module, layer, report.num_layers),
            *(_cell_text(cells.get((module, layer, size))) for size in sizes),
        )
        for module, layer in modules
    ]
    columns = ("module", "layers", *(f"batch {size}" for size in sizes))
    title = f"tp {profile.tp}: ms forward / backward of one module, by micro batch"
    return build_table(title, columns, rows)


def _layer_text(module: str, layer: int, num_layers: int) -> str:
    if layer >= 0:
        return str(layer)
    return "" if module in ("embed", "lm_head") else f"each of {num_layers}"


def _cell_text(item: ModuleTime | None) -> str:
    if item is None:
        return ""
    forward = f"{item.forward_us / US_PER_MS:.4g}"
    return f"{forward} / {item.backward_us / US_PER_MS:.4g}" if item.backward_us else forward


def write_profiles(report: GraphReport, config: Mapping[str, Any], folder: Path) -> list[str]:
    """Write each profile as JSON for scenarios and as FASOP's table; say what was written.

    Raises:
        InvalidRequestError: the folder cannot be written to.

    """
    lines = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if report.architecture_json:
            name = f"{text_to_name(report.model.lower()) or 'model'}.architecture.json"
            own = path_inside(folder, name, "out")
            own.write_text(f"{report.architecture_json}\n", encoding="utf-8")
            lines.append(f"{own}: the model as layers of kinds, for `model` of a scenario")
        for profile in report.profiles:
            name = TableKey(profile.model, profile.device, profile.tp).file_name
            path = path_inside(folder, name, "out")
            own = path.with_suffix(".json")
            own.write_text(json.dumps(schema.encode(profile), indent=1) + "\n", encoding="utf-8")
            lines.append(f"{own}: for `module_times` of a training scenario")
            table, reason = fasop_table(profile, config)
            if reason:
                lines.append(f"{path.name} is not written: {reason}")
            else:
                np.savez(path, data=table)
                lines.append(f"{path}: FASOP's table, forward, ms")
    except OSError as err:
        raise InvalidRequestError.of_field("out", f"cannot write {folder}: {err}") from err
    return lines or ["no profile came of it: nothing is written"]


def fasop_table(profile: ModuleTimes, config: Mapping[str, Any]) -> tuple[Floats, str]:
    """Return FASOP's table, ms forward by micro batch and column, or why a profile has none.

    Fused projections count by their widths, which `config` (a `config.json`) tells; a column that
    the model has not is 0. Of layers that differ the mean counts.
    """
    by_size: dict[int, dict[str, float]] = {}
    for size, module, time_us in _means(profile.times):
        by_size.setdefault(size, {})[module] = time_us
    shares = _widths(config)
    rows: list[list[float]] = []
    for times in by_size.values():
        for fused, columns in _FUSED.items():
            whole = times.pop(fused, None)
            if whole is not None:
                times |= {column: whole * shares[column] for column in columns}
        names = [column.name for column in COLUMNS]
        strangers = sorted(set(times) - set(names))
        if strangers:
            return np.empty((0, 0)), f"FASOP has no column for {', '.join(strangers)}"
        missing = [name for name in names if name not in times and name not in _OPTIONAL]
        if missing:
            return np.empty((0, 0)), f"the model has no {', '.join(missing)}"
        rows.append([times.get(name, 0.0) / US_PER_MS for name in names])
    return np.array(rows, dtype=np.float64), ""


def _means(times: Sequence[ModuleTime]) -> Iterator[tuple[int, str, float]]:
    """Yield micro batch size, module and µs, with the mean of layers that differ."""
    found: dict[tuple[int, str], list[float]] = {}
    for item in times:
        found.setdefault((item.micro_batch_size, item.module), []).append(item.forward_us)
    for (size, module), values in found.items():
        yield size, module, fmean(values)


def _widths(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of each part in a fused projection."""
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    kv_heads = config.get("num_key_value_heads") or heads
    whole = heads + 2 * kv_heads
    parts = (heads / whole, kv_heads / whole, kv_heads / whole)
    return {**dict(zip(_QKV, parts, strict=True)), **dict.fromkeys(_GATE_UP, 0.5)}
