"""Profile a model by its graph: every call timed once, folded to modules, for each rank shape."""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretoken.domain import schema
from foretoken.domain.errors import CancelledJobError, ForetokenError, ServiceUnavailableError
from foretoken.domain.measurements.measurement import Run, RunKind
from foretoken.domain.measurements.profiling import GRAPH_KIND, GraphReport, GraphRequest
from foretoken.domain.measurements.training_truth import ModuleTimes
from foretoken.domain.name import text_to_name
from foretoken.domain.ports import CatalogPort
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.environment import FRAMEWORK, framework_version, free_memory_bytes
from foretoken.profiler.graph.architecture import read_architecture
from foretoken.profiler.graph.model import (
    ModelShape,
    count_layers,
    lengthen_positions,
    outline_model,
    read_model_config,
)
from foretoken.profiler.graph.rank_profile import GraphSession, RankProfiler
from foretoken.profiler.graph.whole_pass import MemoryLimit
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.recording.batch_sender import HandOver
from foretoken.profiler.recording.batches import BatchWriter, RowBuilder, open_writer
from foretoken.profiler.report import ReportShelf
from foretoken.profiler.timing.case import Rig

TOOL = "foretoken profiler (graph)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKeeping:
    """Where rows go: the catalog, with what the run's environment says, by way of a folder."""

    catalog: CatalogPort
    spool_folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    hand_over: HandOver = field(default_factory=HandOver)


def check_graph_request(request: GraphRequest) -> None:
    """Check what can be checked before a job starts.

    Raises:
        InvalidRequestError: the request cannot be met, transformers is not installed, or cannot
            build the model.

    """
    read_model_config(request)


def profile_graph(
    request: GraphRequest,
    rig: Rig,
    keeping: RowKeeping,
    progress: JobProgress,
    *,
    free_bytes: Callable[[LocalDevice], float] = free_memory_bytes,
) -> GraphReport:
    """Trace a model with random weights and time the calls of its graph on the rig's device.

    What does not fit the memory, cannot be split or traced is listed in the notes; rows are
    recorded as they come, and the catalog keeps the report under the run's name. `free_bytes` is
    the memory that is free on a device.

    Raises:
        InvalidRequestError: the model cannot be built.
        CancelledJobError: cancelled; the rows until then are recorded.
        ForetokenError: the catalog refused rows, or stayed away to the end.

    """
    start_s = time.monotonic()
    config = read_model_config(request)
    notes = [note] if (note := lengthen_positions(config, request.sequence_length)) else []
    architecture_json, problem = _read_layers(request, config)
    notes += [problem] if problem else []
    run = _open_run(request, rig, keeping)
    with open_writer(keeping.catalog, run, keeping.spool_folder, keeping.hand_over) as writer:
        session = GraphSession(
            request=request,
            config=config,
            rig=rig,
            memory=MemoryLimit(device=rig.device, free_bytes=free_bytes),
            rows=RowBuilder(rig.device.name, FRAMEWORK, framework_version()),
            writer=writer,
            progress=progress,
            notes=notes,
        )
        profiles = _profile_ranks(session, writer, progress)
    report = GraphReport(
        run_id=run.run_id,
        device=rig.device.name,
        model=request.model,
        num_layers=count_layers(config),
        num_layers_timed=session.num_layers_timed,
        num_nodes=session.num_calls,
        profiles=profiles,
        notes=tuple(dict.fromkeys(session.notes)),
        wall_s=time.monotonic() - start_s,
        architecture_json=architecture_json,
    )
    # What did not fit is in its notes: a pass is no operator, so it has no row.
    shelf = ReportShelf(catalog=keeping.catalog, kind=GRAPH_KIND, hand_over=keeping.hand_over)
    facts = {"model": report.model, "device": report.device}
    shelf.keep(run.run_id, report, facts, lambda text: progress.update(1.0, text))
    return report


def _read_layers(request: GraphRequest, config: Any) -> tuple[str, str]:
    """Return the model as layers of kinds, as JSON, or what is in the way of that."""
    shape = ModelShape(
        config=config, num_layers=count_layers(config), num_ranks=1, dtype=torch.bfloat16
    )
    try:
        outline = outline_model(shape, request.model)
        architecture = read_architecture(outline, config, request.model)
    except ForetokenError as err:
        return "", f"no layers of kinds: {err}"
    content = {name: value for name, value in schema.encode(architecture).items() if value}
    return json.dumps(content), ""


def _profile_ranks(
    session: GraphSession, writer: BatchWriter, progress: JobProgress
) -> tuple[ModuleTimes, ...]:
    tp_sizes = tuple(dict.fromkeys(session.request.tp_sizes)) or (1,)
    profiler = RankProfiler(session)
    try:
        found = [
            profiler.profile(num_ranks, (place / len(tp_sizes), (place + 1) / len(tp_sizes)))
            for place, num_ranks in enumerate(tp_sizes)
        ]
    except CancelledJobError:
        # Whoever cancels does not want to wait; what the catalog has not is kept.
        with suppress(CancelledJobError, ServiceUnavailableError):
            writer.finish(lambda _: None, is_hasty=True)
        raise
    writer.finish(lambda message: progress.update(1.0, message))
    return tuple(times for times in found if times is not None)


def _open_run(request: GraphRequest, rig: Rig, keeping: RowKeeping) -> Run:
    import transformers

    environment = {
        **keeping.environment,
        "model": request.model,
        "sequence_length": str(request.sequence_length),
        "seed": str(request.seed),
        "transformers": str(transformers.__version__),
    }
    name = text_to_name(request.model.lower()).strip("-") or "model"
    return Run(
        run_id=f"graph-{rig.device.name}-{name}-{uuid.uuid4().hex[:12]}",
        kind=RunKind.PROFILE,
        tool=TOOL,
        source=environment.get("gpu", environment.get("cpu", rig.device.name)),
        environment=environment,
    )
