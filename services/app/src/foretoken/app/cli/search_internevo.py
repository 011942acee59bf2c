"""`foretoken search internevo`: the question of InternEvo's simulator, in its terms."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import typer
from rich.table import Table

from foretoken.app.cli.output_file import (
    write_columns,
    write_page,
)
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.search_training_text import describe_finalist
from foretoken.app.cli.state import (
    build_table,
    leave_unless,
    note,
    open_services,
    page_table,
    show_progress,
    stack,
)
from foretoken.client.facade import Foretoken
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.option import describe, option
from foretoken.domain.requests.training_search import TrainingSearchReport, TrainingSearchRequest
from foretoken.domain.units import GIB, MS_PER_S
from foretoken.simulator.report.internevo_comparison import (
    comparison_remarks,
    comparison_section,
    comparison_table,
)
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.report.training_search_rows import (
    describe_search,
    report_rows,
    ruled_out_table,
)
from foretoken.simulator.search.internevo.question import (
    SEQUENCE_LENGTH,
    InternEvoTerms,
    build_request,
)
from foretoken.simulator.search.internevo.simulator_verdicts import (
    SimulatorVerdicts,
    judge_by_simulator,
)

_TERMS = tuple(item.name for item in fields(InternEvoTerms))


@dataclass(frozen=True, kw_only=True)
class InternEvoOptions:
    """The question."""

    world_size: int = field(
        metadata=describe("GPUs to train on.", names=("--world-size", "--world_size"), minimum=1)
    )
    global_batch_size: int = field(
        metadata=describe(
            "Tokens of a step.", names=("--global-batch-size", "--global_batch_size"), minimum=1
        )
    )
    model: str = option(
        "internlm2-7b",
        "Model: see `foretoken list models`, or the path of a `config.json` or a GGUF file.",
    )
    device: str = option("a100_sxm_80", "Device: see `foretoken list devices`.", syntax="device")
    sequence_length: int = option(
        SEQUENCE_LENGTH, "Tokens of a sample.", names=("--sequence-length", "--seq_len"), minimum=1
    )
    finalists: int = option(5, "How many of the best to simulate event by event.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Where the answer goes."""

    top: int = option(10, "How many to print.", minimum=1)
    page: Path | None = option(None, "Write a page with pictures here (HTML).", syntax="page")
    heat_map: Path | None = option(
        None,
        "Write a heat map here of what devices send to each other with the best strategy,"
        " as .png, .svg or .pdf.",
        syntax="picture",
    )
    export: Path | None = option(
        None,
        "Write the listed strategies here, best first, as .csv, .jsonl or .parquet.",
        syntax="table",
    )


@with_option_groups
def internevo(context: typer.Context, question: InternEvoOptions, answer: AnswerOptions) -> None:
    """Answer what InternEvo's simulator is asked, with its points and in its terms.

    Its algorithms msp, fsp and isp over pipeline (pp), sequence (sp), weights (wp) and optimizer
    states (zo), every micro batch (micro_bsz, micro_num), with and without recomputation (ckpt):
    how many are tried, can run and have the memory, next to what InternEvo's simulator counts, and
    the best by tokens per GPU and second (tgs). The best are simulated event by event. The exit
    status is 3 where nothing fits.

    Example: `foretoken search internevo --world_size 128 --global_batch_size 4194304 --model
    internlm2-7b --device a100_sxm_80`
    """
    with open_services(context) as (state, services):
        request = build_request(
            load_model(question.model),
            question.device,
            world_size=question.world_size,
            global_batch_size=question.global_batch_size,
            sequence_length=question.sequence_length,
            num_finalists=question.finalists,
        )
        foretoken = services.foretoken("simulator")
        with show_progress("search") as update:
            report = foretoken.search_training(request, on_progress=update)
        title = describe_search(report)
        rows = report_rows(report)
        verdicts = _judge(request)
        said = [{**_terms(row), **_figures(row)} for row in rows[: answer.top]]
        state.print_object(
            {"counts": _counts(report), "internevo": _own_counts(verdicts), "best": said},
            lambda: stack(
                _answer(title, report, rows, answer.top),
                *_comparison(report, rows, verdicts),
                "",
                *report.echo.lines(),
            ),
        )
        for finalist in report.finalists:
            note(describe_finalist(finalist))
        _write(report, title, answer, verdicts)
        if answer.heat_map is not None:
            _draw_traffic(foretoken, request, report, answer.heat_map)
        leave_unless(report.num_fitting > 0)


def _counts(report: TrainingSearchReport) -> dict[str, int]:
    return {
        "num_tried": report.num_points,
        "num_legal": report.num_legal,
        "num_fitting": report.num_fitting,
    }


def _judge(request: TrainingSearchRequest) -> SimulatorVerdicts | None:
    """Return what InternEvo's simulator says of the points; None where it does not answer."""
    try:
        return judge_by_simulator(request)
    except InvalidRequestError as error:
        note(f"no counts of InternEvo's simulator: {error}")
        return None


def _own_counts(verdicts: SimulatorVerdicts | None) -> dict[str, int]:
    if verdicts is None:
        return {}
    return {
        "num_tried": verdicts.num_tried,
        "num_legal": verdicts.num_legal,
        "num_fitting": verdicts.num_fitting,
        "num_refused": verdicts.num_refused,
        "num_fitting_unrefused": verdicts.num_fitting_unrefused,
    }


def _comparison(
    report: TrainingSearchReport, rows: Sequence[Row], verdicts: SimulatorVerdicts | None
) -> list[Table | str]:
    if verdicts is None:
        return []
    table = page_table("", comparison_table(report, verdicts))
    return [table, *(f"- {text}" for text in comparison_remarks(rows, verdicts))]


def _draw_traffic(
    foretoken: Foretoken, request: TrainingSearchRequest, report: TrainingSearchReport, path: Path
) -> None:
    """Simulate the best strategy once more, for what its devices send each other."""
    best = min(
        (item for item in report.finalists if item.rank), key=lambda item: item.rank, default=None
    )
    if best is None:
        note("no heat map: no strategy was simulated that has the memory; see --finalists")
        return
    from foretoken.simulator.report.rank_traffic import write_traffic_figure

    scenario = schema.decode(type(request.scenario), json.loads(best.scenario_json))
    write_traffic_figure(path, foretoken.simulate_training(scenario))
    note(f"heat map of {best.name} written to {path}")


def _terms(row: Row) -> dict[str, object]:
    terms = InternEvoTerms.of_row(row)
    return {name: getattr(terms, name) for name in _TERMS}


def _figures(row: Row) -> dict[str, object]:
    return {
        "tgs": float(row["tokens_per_s_per_gpu"]),
        "step (s)": float(row["step_time_ms"]) / MS_PER_S,
        "memory (GiB)": float(row["reserved_bytes"]) / GIB,
    }


def _answer(title: str, report: TrainingSearchReport, rows: Sequence[Row], top: int) -> Table:
    parts: list[Table | str] = []
    if rows:
        # The first of each algorithm, for the best of all may tie.
        firsts = {str(row["weight_parallel"]): row for row in reversed(rows)}
        best = list(firsts.values())
        parts += [_ranking(title, rows[:top]), _ranking("best of each", best)]
    else:
        parts.append(f"{title}: no strategy can run and has the memory")
    if report.ruled_out:
        parts.append(page_table("", ruled_out_table(report)))
    counts = (
        f"{report.num_points:,} tried: {report.num_legal:,} can run, {report.num_fitting:,} have"
        f" the memory; {report.num_simulated:,} simulated"
    )
    effort = f"{report.wall_s:.3g} s, {format_number(report.cpu_s)} s of CPU time"
    return stack(*parts, "", counts, *(f"- {text}" for text in report.notes), effort)


def _ranking(title: str, rows: Sequence[Row]) -> Table:
    columns = ("rank", *_TERMS, *_figures(rows[0]))
    ranked = [
        (row["place"], *_words(_terms(row).values()), *_figures(row).values()) for row in rows
    ]
    return build_table(title, columns, ranked)


def _words(values: Iterable[object]) -> list[object]:
    return [("yes" if value else "no") if isinstance(value, bool) else value for value in values]


def _write(
    report: TrainingSearchReport,
    title: str,
    answer: AnswerOptions,
    verdicts: SimulatorVerdicts | None,
) -> None:
    if answer.export is not None:
        write_columns(report.candidates, answer.export)
        note(f"{len(report.candidates.name):,} strategies written to {answer.export}")
    if answer.page is not None:
        from foretoken.simulator.report.page import result_sections

        sections = result_sections(report)
        if verdicts is not None:
            sections.append(comparison_section(report, report_rows(report), verdicts))
        write_page(answer.page, title, sections)
