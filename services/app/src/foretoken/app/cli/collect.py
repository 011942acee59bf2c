"""`foretoken collect`: replay a workload against a server and record what its client saw."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken.app.cli.option_text import parse_s
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.state import (
    ProgressBar,
    build_table,
    check_output_path,
    note,
    scenario_changes,
    show_progress,
    state_of,
)
from foretoken.app.collect.target import Target
from foretoken.app.config import process_environment
from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.option import describe, flag, option
from foretoken.domain.requests.serving_run import ServingRun, encode_run
from foretoken.domain.requests.slo import SloClass
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.units import MS_PER_S
from foretoken.simulator.workload.request_plan import RequestPlan
from foretoken.simulator.workload.requests import resolve_workload
from foretoken.simulator.workload.trace import load_trace


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which server, and how to ask it."""

    url: str = field(metadata=describe("Address of the server: `http://host:8000`."))
    model: str = field(metadata=describe("Name under which the server serves the model."))
    api: str = option("completions", "`completions` (prompts of exact lengths) or `chat`.")
    server: str = option(
        "vllm",
        "What the server takes beyond OpenAI's own options: `vllm`, `sglang`, `trtllm`,"
        " or `openai` (nothing: prompts are words, and answers may end early).",
    )
    api_key_variable: str = option("OPENAI_API_KEY", "Environment variable that holds the API key.")
    timeout: str = option("10min", "Give a request up after this time: `30s`, `10min`.")
    insecure: bool = flag("Do not verify the server's certificate.")
    certificates: str = option("", "File of certificate authorities to trust (PEM).")
    body: tuple[str, ...] = option(
        (), "Add a field to every request: `top_k=1`. Repeatable.", syntax="words"
    )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What to send when."""

    trace: Path | None = option(None, "Replay this trace, in any format that scenarios take.")
    rate: float | None = option(None, "Send so many requests per s, at random (Poisson).")
    concurrency: int | None = option(
        None, "Keep so many requests under way; each next when one is done."
    )
    num_requests: int = option(
        100, "How many, with --rate or --concurrency.", names=("--num-requests",)
    )
    input_tokens: int = option(512, "Length of each prompt.")
    output_tokens: int = option(128, "Length of each answer.")
    change: tuple[str, ...] = option(
        (),
        "Change one key of the scenario: `workload.rate_rps=4`.",
        names=("--set",),
        syntax="words",
    )
    seed: int = option(0, "Decides arrivals, lengths and prompts.", minimum=0)
    max_in_flight: int = option(
        0, "Never have more requests under way than this (0: any number).", minimum=0
    )
    warm_up: int = option(1, "Requests to send before, not recorded.", minimum=0)


@with_option_groups
def collect(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(help="Write the run here (JSON).", callback=check_output_path)
    ],
    server: ServerOptions,
    load: LoadOptions,
    scenario: Annotated[
        Path | None, typer.Argument(help="Scenario file whose workload to replay (YAML).")
    ] = None,
) -> None:
    """Replay a workload against an OpenAI-compatible server, and record every token's time.

    Say what to send in one of four ways: a SCENARIO file, `--trace FILE`, `--rate R` or
    `--concurrency C`. Prompts are made up: as long as the workload says, and alike where its
    prompts are. Answers are streamed. Ctrl-C stops, and keeps what was recorded.

    Then `foretoken validate serving SCENARIO --measured RUN` shows how a simulation compares.

    Example: `foretoken collect --url http://localhost:8000 --model my-model --rate 4
    --num-requests 200 --input-tokens 1024 --output-tokens 256 --out run.json`
    """
    state = state_of(context)
    # Its client takes long to import, and no other command needs it.
    from foretoken.app.collect.recording import Collection, collect_run

    plan = _plan(scenario, load)
    collection = Collection(
        target=_target(server),
        plan=plan,
        name=out.stem,
        seed=load.seed,
        num_warm_up=load.warm_up,
        max_in_flight=load.max_in_flight,
        settings=_settings(scenario, server, load),
    )
    with show_progress(f"collect {plan.num_requests} requests from {server.url}") as bar:
        run = collect_run(collection, _show(bar))
    out.write_text(encode_run(run), encoding="utf-8")
    summary = _summarise(run)
    state.print_object(summary, lambda: _summary_table(run, summary))
    note(f"run written to {out}")
    _warn(run, plan)


def _plan(scenario: Path | None, load: LoadOptions) -> RequestPlan:
    given = {
        "SCENARIO": scenario,
        "--trace": load.trace,
        "--rate": load.rate,
        "--concurrency": load.concurrency,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        found = ", ".join(named) or "none"
        problem = f"give one of {', '.join(given)}; found {found}"
        raise InvalidRequestError.of_field("workload", problem)
    if load.change and scenario is None:
        raise InvalidRequestError.of_field("--set", "changes a SCENARIO, and none is given")
    if scenario is not None:
        read = read_serving_scenario(scenario, scenario_changes(load.change))
        return resolve_workload(read.workload, read.slo_classes, read.seed)
    if load.rate is not None and not load.rate > 0:
        raise InvalidRequestError.of_field("--rate", "must be positive")
    workload = _workload(load)
    # Servers know nothing of classes: any name that a trace has is good.
    names = sorted({request.slo_class for request in workload.trace_requests} - {""})
    return resolve_workload(workload, [SloClass(name=name) for name in names], load.seed)


def _workload(load: LoadOptions) -> WorkloadSpec:
    if load.trace is not None:
        content = load_trace(load.trace)
        return WorkloadSpec(
            arrival="trace",
            trace_requests=content.requests,
            hash_block_tokens=content.hash_block_tokens,
        )
    prefill, decode = LengthSpec(mean=load.input_tokens), LengthSpec(mean=load.output_tokens)
    if load.concurrency is not None:
        return WorkloadSpec(
            arrival="closed_loop",
            arrival_options={"concurrency": str(load.concurrency)},
            num_requests=load.num_requests,
            prefill=prefill,
            decode=decode,
        )
    return WorkloadSpec(
        rate_rps=load.rate or 0.0, num_requests=load.num_requests, prefill=prefill, decode=decode
    )


def _target(server: ServerOptions) -> Target:
    return Target(
        url=server.url,
        model=server.model,
        api=server.api,
        server=server.server,
        api_key=process_environment().get(server.api_key_variable, ""),
        timeout_s=parse_s(server.timeout, "--timeout"),
        verifies_tls=not server.insecure,
        certificates=server.certificates,
        body=scenario_changes(server.body),
    )


def _settings(scenario: Path | None, server: ServerOptions, load: LoadOptions) -> Mapping[str, str]:
    """Return how the run was made; neither addresses nor keys go into a file people share."""
    found: dict[str, Any] = {"scenario": scenario.name if scenario else None}
    found |= {name: getattr(server, name) for name in ("api", "server", "timeout")}
    found |= {"body": ", ".join(server.body or ())}
    found |= {"set": ", ".join(load.change or ()), "trace": load.trace.name if load.trace else None}
    found |= {name: getattr(load, name) for name in ("max_in_flight", "warm_up")}
    if scenario is None:
        found["seed"] = load.seed
    if scenario is None and load.trace is None:
        names = ("rate", "concurrency", "input_tokens", "output_tokens")
        found |= {name: getattr(load, name) for name in names}
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def _show(bar: ProgressBar) -> Any:
    def show(num_done: int, num_all: int, num_under_way: int) -> None:
        bar.set(num_done / num_all, f"{num_done} of {num_all} done, {num_under_way} under way")

    return show


def _summarise(run: ServingRun) -> dict[str, float]:
    """Return the figures of a run that say whether it went well."""
    done = run.completed
    lateness = [r.arrival_s - r.planned_s for r in run.requests if r.planned_s >= 0]
    ttft = [(r.first_token_s - r.arrival_s) * MS_PER_S for r in done]
    duration_s = max((r.last_token_s for r in done), default=0.0)
    tokens = sum(r.num_decode_tokens for r in done)
    return {
        "num_completed": len(done),
        "num_failed": run.num_failed,
        "duration_s": duration_s,
        "output_throughput_tps": tokens / duration_s if duration_s else 0.0,
        "ttft_ms_p50": median(ttft) if ttft else 0.0,
        "ttft_ms_max": max(ttft, default=0.0),
        "send_delay_ms_max": max(lateness, default=0.0) * MS_PER_S,
    }


def _summary_table(run: ServingRun, summary: Mapping[str, float]) -> Table:
    labels = {
        **{
            name: METRICS[name].title
            for name in ("num_completed", "duration_s", "output_throughput_tps")
        },
        "num_failed": "failed requests",
        "ttft_ms_p50": "TTFT p50 (ms)",
        "ttft_ms_max": "TTFT max (ms)",
        "send_delay_ms_max": "latest send after its time (ms)",
    }
    rows = [(labels[name], value) for name, value in summary.items()]
    return build_table(f"Run of {run.model}", ("", "value"), rows)


def _warn(run: ServingRun, plan: RequestPlan) -> None:
    """Tell what makes a run less than it should be."""
    if run.is_interrupted:
        note(f"interrupted: {len(run.requests)} of {plan.num_requests} requests were sent")
    elif len(run.requests) < plan.num_requests:
        num_left = plan.num_requests - len(run.requests)
        note(f"{num_left} turns were not sent, as the turn before them failed")
    errors = sorted({request.error for request in run.requests if request.error})
    for error in errors[:3]:
        note(f"failed: {error}")
    asked = int(plan.num_decode_tokens.sum())
    got = sum(request.num_decode_tokens for request in run.completed)
    if run.completed and not run.num_failed and got < asked:
        note(
            f"answers hold {got:,} of {asked:,} tokens: the server ended some early."
            " `validate serving` takes the lengths they had"
        )
