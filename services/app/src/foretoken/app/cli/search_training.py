"""`foretoken search training`: rank the strategies of a training run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import typer

from foretoken.app.cli.dim_text import parse_values
from foretoken.app.cli.generate import GenerateOptions, launch_best
from foretoken.app.cli.option_text import AXES, SEARCHED_AXES, check_prices, parse_axes
from foretoken.app.cli.output_file import (
    write_columns,
    write_page,
)
from foretoken.app.cli.request_options import Answers, OptionsOf, with_option_groups
from foretoken.app.cli.search_training_text import describe_finalist, report_table
from foretoken.app.cli.state import (
    leave_unless,
    note,
    note_search,
    open_services,
    parse_assignments,
    scenario_changes,
    show_progress,
)
from foretoken.app.scenario_file import (
    build_training_scenario,
    read_search_request,
    read_searched_scenario,
)
from foretoken.client.job_wait import wait_for_job
from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, ForetokenError, InvalidRequestError
from foretoken.domain.hardware.price import load_price_list
from foretoken.domain.job import Job
from foretoken.domain.plugins import read_yaml
from foretoken.domain.ports import SimulatorPort
from foretoken.domain.requests.dataset import find_dataset
from foretoken.domain.requests.option import flag, option
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    TrainingSearchReport,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.simulator.report.training_search_rows import describe_search
from foretoken.simulator.search.placement.export import check_fasop_path, write_fasop

# The parts of the command's help.
_ASKED, _CLUSTER = "What is trained", "What it runs on"
_SPACE, _EFFORT = "What may vary", "What ranks, and how much is computed"
# What a request cannot do without: the option, what a scenario has instead, and an example.
_NEEDED = {
    "model": ("--model", "names model", "llama-2-7b"),
    "device": ("--device", "names device", "h100_sxm"),
    "layout": ("--gpus", "has a layout", "64"),
    "global_batch_size": ("--global-batch-tokens", "names global_batch_size", "4194304"),
}
_RESULTS = "Results"
# A stream of finalists ends with its job; what is late is in the report all the same.
_LAST_FINALIST_S = 5.0


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """What is to be trained. Options change what the scenario file says."""

    model: str = option(
        "",
        "Model: a preset (`foretoken list models`) or the path of a `config.json` or a GGUF file.",
        group=_ASKED,
    )
    global_batch_tokens: str = option(
        "",
        "Tokens of a step, several with commas: `4194304`. A multiple of the sequence length.",
        group=_ASKED,
    )
    sequence_length: int | None = option(
        None, "Tokens of a sample (default: the scenario's, or 4096).", minimum=1, group=_ASKED
    )
    trainer: str = option(
        "", "The training framework: see `foretoken list trainers`.", group=_ASKED
    )
    tokens: float = option(
        0.0,
        "Also tell steps, days and cost of a run to so many tokens: `2e12`.",
        minimum=0,
        group=_ASKED,
    )
    dataset: str = option(
        "", "The same for a known dataset, once through (`foretoken list datasets`).", group=_ASKED
    )
    change: tuple[str, ...] = option(
        (),
        "Change one key of the scenario that is not searched: `dtype=bf16`. Repeatable.",
        names=("--set",),
        syntax="words",
        group=_ASKED,
    )
    request: Path | None = option(
        None,
        "A whole request in a file (YAML or JSON), as a report shows it: `scenario`,"
        " `space` and the rest. Other options of what to search for are not read.",
        syntax="file",
        group=_ASKED,
    )

    @property
    def num_tokens(self) -> float:
        """Tokens of the whole run; 0 where none is asked for.

        Raises:
            InvalidRequestError: both options say so, or no such dataset.

        """
        if self.tokens and self.dataset:
            raise InvalidRequestError.of_field("--tokens", "says the same as --dataset: give one")
        return find_dataset(self.dataset).num_tokens if self.dataset else self.tokens


@dataclass(frozen=True, kw_only=True)
class SpaceOptions:
    """Where else it is said what may vary, and what devices cost."""

    vary: tuple[str, ...] = option(
        (),
        "Try only these values of an axis, repeatable: `tp=1,2,4`, `micro_batch_size=1:8`,"
        f" `recompute=none,full`. Axes: {', '.join(AXES)}.",
        syntax="words",
        group=_SPACE,
    )
    space: Path | None = option(
        None,
        "A file (YAML) of a space: lists by axis, as a request has them under `space`.",
        syntax="file",
        group=_SPACE,
    )
    price_list: str = option(
        "",
        "Price devices by a list (`foretoken list prices`), or by a YAML file of yours.",
        group=_CLUSTER,
    )
    spot: bool = flag("With --price-list: take the spot prices.", group=_CLUSTER)


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Which search is watched."""

    job: str = option(
        "", "Go on watching a search that was started before, instead of a new one.", group=_EFFORT
    )


def build_training_request(
    scenario: Path | None,
    question: QuestionOptions,
    space: SpaceOptions,
    answers: Answers,
) -> TrainingSearchRequest:
    """Return what the options ask for.

    Raises:
        InvalidRequestError: no model, device or batch, or a value that cannot be.

    """
    if question.request is not None:
        return read_search_request(question.request, TrainingSearchRequest, build_training_scenario)
    said = answers.read()
    given = said.pop("space", {})
    sizes = given.pop("global_batch_sizes", ())
    asked = _build_space(given, space)
    resolved = _resolve(scenario, question, asked, has_batch=bool(sizes))
    asked = replace(asked, usd_per_hour=_listed_prices(space, asked, resolved.device))
    if said.get("objective") == "cost":
        _check_priced(asked, resolved.device)
    if sizes and question.global_batch_tokens:
        raise InvalidRequestError.of_field(
            "--global-batch", "says the same as --global-batch-tokens: give one"
        )
    sizes = sizes or _batch_sizes(question, resolved) or asked.global_batch_sizes
    if sizes:
        asked = replace(asked, global_batch_sizes=sizes)
        resolved = replace(resolved, global_batch_size=sizes[0])
    return schema.decode(TrainingSearchRequest, {"scenario": resolved, "space": asked, **said})


def _resolve(
    scenario: Path | None, question: QuestionOptions, space: TrainingSpace, *, has_batch: bool
) -> TrainingScenario:
    """Return the scenario: the file's, changed by options, or one of options alone."""
    content = read_searched_scenario(scenario)
    if not space.node_groups:
        _check_changes(question.change or [])
    overrides = _overrides(question, space)
    known = {*content, *overrides}
    if has_batch or question.global_batch_tokens or space.global_batch_sizes:
        known.add("global_batch_size")
    if scenario is not None or space.num_devices or space.node_groups:
        known.add("layout")
    lacking = [
        FieldViolation(option, f"is needed where no scenario {says}, as in {option} {example}")
        for key, (option, says, example) in _NEEDED.items()
        if key not in known
    ]
    if lacking:
        raise InvalidRequestError.of_violations(lacking)
    return build_training_scenario(content, overrides, scenario or Path("search.yaml"))


def _check_changes(words: Sequence[str]) -> None:
    """Refuse changes of what the search varies whatever the scenario says."""
    for name, value in parse_assignments(words).items():
        axis = name.removeprefix("layout.")
        if axis in SEARCHED_AXES:
            raise InvalidRequestError.of_field(
                f"--set {name}", f"is searched; to fix it: --vary {axis}={value}"
            )


def _overrides(question: QuestionOptions, space: TrainingSpace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if question.model:
        overrides["model"] = question.model
    if space.devices:
        overrides["device"] = space.devices[0]
    elif space.node_groups:
        overrides["device"] = space.node_groups[0].device
    if question.sequence_length:
        overrides["sequence_length"] = question.sequence_length
    if question.trainer:
        overrides["trainer.profile"] = question.trainer
    return overrides | scenario_changes(question.change)


def _batch_sizes(question: QuestionOptions, scenario: TrainingScenario) -> tuple[int, ...]:
    """Return samples per step, of the option in tokens; none without it."""
    if not question.global_batch_tokens:
        return ()
    length = scenario.sequence_length
    tokens = parse_values("--global-batch-tokens", question.global_batch_tokens)
    if uneven := [count for count in tokens if count < length or count % length]:
        raise InvalidRequestError.of_field(
            "--global-batch-tokens",
            f"{uneven[0]:,} is no multiple of the sequence length, {length:,}: change it with"
            " --sequence-length",
        )
    return tuple(count // length for count in tokens)


def _build_space(given: dict[str, Any], space: SpaceOptions) -> TrainingSpace:
    """Return the space: the file's, changed by axes, changed by options."""
    groups = given.get("node_groups")
    if groups and "num_devices" in given:
        raise InvalidRequestError.of_field("--gpus", "--nodes says already how many there are")
    if ("has_subsets" in given or "partition" in given) and not groups:
        raise InvalidRequestError.of_field("--subsets, --partition", "are of --nodes")
    check_prices(given)
    filed = read_yaml(space.space, "space") if space.space is not None else {}
    said = {**filed, **parse_axes(space.vary or []), **given}
    return schema.decode(TrainingSpace, said, "space")


def _listed_prices(options: SpaceOptions, space: TrainingSpace, device: str) -> Mapping[str, float]:
    """Return the list's price of each device that is searched, where no other is given."""
    if not options.price_list:
        if options.spot:
            raise InvalidRequestError.of_field("--spot", "is of --price-list")
        return space.usd_per_hour
    prices = load_price_list(options.price_list)
    grouped = tuple(group.device for group in space.node_groups)
    listed = {}
    for name in dict.fromkeys(space.devices or grouped or (device,)):
        if name not in space.usd_per_hour:
            found = prices.find(name, is_spot=options.spot)
            listed[name] = found.pick(is_spot=options.spot)
            note(f"{name}: USD {listed[name]:g} an hour, {found.describe(is_spot=options.spot)}")
    return {**listed, **space.usd_per_hour}


def _check_priced(space: TrainingSpace, device: str) -> None:
    """Refuse to rank by cost what has no price, before a search is started.

    Raises:
        InvalidRequestError: a device has none.

    """
    grouped = [group.device for group in space.node_groups if not group.usd_per_hour]
    searched = grouped if space.node_groups else space.devices or (device,)
    unpriced = [name for name in dict.fromkeys(searched) if not space.usd_per_hour.get(name)]
    if unpriced:
        options = " ".join(f"--price {name}=USD" for name in unpriced)
        raise InvalidRequestError.of_field(
            "--objective", f"to rank by cost, say what an hour costs: {options}, or --price-list"
        )


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where results go."""

    top: int = option(
        10, "How many layouts to print, each with its best strategy.", minimum=1, group=_RESULTS
    )
    page: Path | None = option(
        None,
        "Write a page with pictures here (HTML).",
        names=("--page", "--out"),
        syntax="page",
        group=_RESULTS,
    )
    export: Path | None = option(
        None,
        "Write the listed strategies here, best first, as .csv, .jsonl or .parquet.",
        syntax="table",
        group=_RESULTS,
    )
    fasop: Path | None = option(
        None,
        "Write them with the columns of FASOP here, as .csv or .jsonl.",
        names=("--fasop", "--fasop-csv"),
        syntax="output",
        group=_RESULTS,
    )


@with_option_groups
def training(  # noqa: PLR0913, PLR0917 - groups of options
    context: typer.Context,
    question: QuestionOptions,
    answers: Annotated[Answers, OptionsOf(TrainingSearchRequest, partial=("space.",))],
    space: SpaceOptions,
    watch: WatchOptions,
    results: ResultOptions,
    generated: GenerateOptions,
    scenario: Annotated[
        Path | None,
        typer.Argument(help="Scenario file (YAML): model, device, trainer. Or options."),
    ] = None,
) -> None:
    """Find the best way to train a model on a cluster: every strategy counted.

    Every split over tensor, pipeline, data, context and expert parallelism, every micro batch,
    ZeRO stage, overlap and recomputation is checked, answered in closed form and ranked; the best
    are simulated event by event. An equals sign marks what ties with the best within the error.
    What cannot run or has not the memory is counted by its reason. The exit status is 3 where
    nothing fits.

    - 128 GPUs for Llama 2 7B with 4 Mi tokens a step: `foretoken search training --model
    llama-2-7b --gpus 128 --device a100_sxm_80 --global-batch-tokens 4194304 --page report.html`

    - Only some of the space: `... --vary tp=1,2,4,8 --vary zero_stage=1 --vary recompute=none`

    - The cheapest cluster: `... --devices h100_sxm,a100_sxm_80 --gpus 64:512 --price h100_sxm=2.5
    --price a100_sxm_80=1.4 --objective cost`

    - GPUs of two types: `... --nodes a100_sxm_80=8x8 --nodes h100_sxm=4x8 --partition dynamic`

    - From the answer to a job: `... --generate launch --framework megatron-core`

    - A scenario of your own: `foretoken search training docs/examples/training.yaml --sensitivity`

    Ctrl-C cancels the search. After a crash the same command goes on where it was. A search that a
    service runs goes on without its watcher: `--job NAME` watches it again.
    """
    with open_services(context) as (state, services):
        generated.check(has_finalists=bool(watch.job) or answers.given["num_finalists"] > 0)
        num_tokens = question.num_tokens
        if results.fasop is not None:
            check_fasop_path(results.fasop)
        simulator = services.simulator
        if watch.job:
            job = simulator.get_job(watch.job)
        else:
            request = build_training_request(scenario, question, space, answers)
            request = generated.bound_request(request)
            job = simulator.create_training_search(request)
            note_search(job)
        report = _watch(simulator, job)
        title = describe_search(report)
        state.print_object(
            report, lambda: report_table(title, report, results.top, num_tokens), report.echo
        )
        _write(report, title, results, num_tokens)
        leave_unless(report.num_fitting > 0)
        launch_best(report, generated)


def _watch(simulator: SimulatorPort, job: Job) -> TrainingSearchReport:
    """Return the report once the job has ended; tell of every finalist as soon as it is there."""
    with show_progress("search") as update, _told_finalists(simulator, job.job_id):
        wait_for_job(simulator, job, update)
    return simulator.get_training_search_report(job.job_id)


@contextmanager
def _told_finalists(simulator: SimulatorPort, job_id: str) -> Iterator[None]:
    def tell() -> None:
        # What ends the search is said by whoever waits for it.
        with suppress(ForetokenError):
            for finalist in simulator.watch_training_search(job_id):
                note(describe_finalist(finalist))

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        teller.join(_LAST_FINALIST_S)


def _write(
    report: TrainingSearchReport, title: str, results: ResultOptions, num_tokens: float
) -> None:
    if results.export is not None:
        write_columns(report.candidates, results.export)
        note(f"{len(report.candidates.name):,} strategies written to {results.export}")
    if results.fasop is not None:
        write_fasop(report, results.fasop, num_tokens)
        note(f"{len(report.candidates.name):,} strategies written to {results.fasop}")
    if results.page is not None:
        from foretoken.simulator.report.page import result_sections

        write_page(results.page, title, result_sections(report, num_tokens=num_tokens))
