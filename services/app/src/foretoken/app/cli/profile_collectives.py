"""`foretoken profile collectives`: how fast groups of devices exchange data, and at what price."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretoken.app.cli.collective_calls import (
    CollectiveChoice,
    bandwidth_calls,
    bandwidth_chart,
    find_timings,
    gemm_of_text,
    overlap_calls,
    parse_sizes,
    print_bandwidths,
    print_overlaps,
)
from foretoken.app.cli.dim_text import parse_values
from foretoken.app.cli.output_file import check_picture_option
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.state import (
    CliState,
    note,
    open_composition,
    show_progress,
    state_of,
)
from foretoken.app.config import EMBEDDED, AppConfig, process_environment
from foretoken.client.single_query import find_member
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.profiling import ProfileReport, ProfileRequest
from foretoken.domain.operators.spec.operator import all_operators, find_operator
from foretoken.domain.requests.option import flag, option
from foretoken.jobs.runner import JobProgress
from foretoken.page.picture import write_picture

if TYPE_CHECKING:
    from foretoken.profiler.ranks.rendezvous import RendezvousSpec

_CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """What is timed, between whom."""

    device: str = option(_CPU, "Device: see `foretoken profile devices`.", syntax="device")
    operator: tuple[str, ...] = option(
        (), "Only this collective. Repeatable. With --overlap all_reduce alone.", syntax="words"
    )
    dtype: str = option("", "Number format (default: fp32 on a CPU, bf16 on a GPU).")
    ranks: str = option(
        "",
        "Devices of a group on one node, `2,4` or `2:8`; on a CPU processes (default: 2 on"
        " a CPU, 2, 4 and 8 as far as there are on a GPU).",
    )
    nodes: str = option("", "Nodes of a group, `1,2` (default: 1, and all of a rendezvous).")
    sizes: str = option(
        "",
        "Message sizes: `1KiB:1GiB` doubles, `64KiB,1MiB` are two (default: that, in steps"
        " of eight up to 32MiB with --quick).",
    )


@dataclass(frozen=True, kw_only=True)
class OutcomeOptions:
    """How it is timed, and what is shown."""

    quick: bool = flag("Few sizes, timed less precisely.")
    again: bool = flag("Measure points the catalog already has, too.")
    overlap: bool = flag(
        "Time a matrix product and a collective alone and next to each other instead."
    )
    gemm: str = option("", "With --overlap: the product, as MxNxK (default: 512 or 4096 cubed).")
    picture: Path | None = option(
        None, "Draw bus bandwidth over message size into this .svg, .png or .pdf."
    )


@with_option_groups
def collectives(context: typer.Context, group: GroupOptions, outcome: OutcomeOptions) -> None:
    """Time collectives between devices, record them, and show their bandwidths.

    NCCL between GPUs, Gloo between processes of a CPU. Algorithm bandwidth is the message over the
    time; bus bandwidth is what a rank sends over the time, as nccl-tests count it, and can be held
    against that of the links. The slowest rank counts.

    - Two and four processes of this CPU: `foretoken profile collectives --ranks 2,4 --quick`

    - All GPUs of this machine, with a picture: `foretoken profile collectives --device h200_sxm
    --picture bandwidth.svg`

    - How much communication slows computation down: `foretoken profile collectives --overlap`

    - Two machines: the same command on both, with
    `FORETOKEN_PROFILER__RENDEZVOUS__ENDPOINT=host:29500`, `..._NUM_NODES=2` and `..._NODE_RANK=0`
    or 1; or under `torchrun`. Node 0 records.
    """
    _check_picture(outcome)
    state = state_of(context)
    place = find_place(state.config)
    choice = _choose(group, outcome, place.num_nodes)
    if not place.is_leader:
        serve_place(place, group.device, max(choice.ranks))
        return
    _lead(state, group, outcome, choice)


def _lead(
    state: CliState, group: GroupOptions, outcome: OutcomeOptions, choice: CollectiveChoice
) -> None:
    with open_composition(state) as services:
        calls = _calls(choice, outcome)
        request = ProfileRequest(
            device=group.device,
            calls=calls,
            quick=outcome.quick,
            skip_covered=not outcome.again,
            num_ranks=max(choice.ranks) if group.ranks else 0,
        )
        with show_progress("profile collectives") as update:
            report = services.foretoken("profiler").profile(request, on_progress=update)
        timings = find_timings(services.catalog, report, calls)
        if outcome.overlap:
            print_overlaps(state, timings, calls)
        else:
            print_bandwidths(state, timings)
        _tell_failures(report)
        if outcome.picture is not None:
            write_picture(outcome.picture, [bandwidth_chart(timings)])
            note(f"picture written to {outcome.picture}")
    if report.num_failed and not timings:
        raise typer.Exit(code=1)


def _calls(choice: CollectiveChoice, outcome: OutcomeOptions) -> tuple[OperatorCall, ...]:
    if not outcome.overlap:
        return bandwidth_calls(choice)
    size = 512 if choice.dtype is DType.FP32 else 4096
    return overlap_calls(choice, gemm_of_text(outcome.gemm or f"{size}x{size}x{size}"))


def _choose(group: GroupOptions, outcome: OutcomeOptions, num_nodes: int) -> CollectiveChoice:
    is_cpu = group.device == _CPU
    known = [name for name, spec in all_operators().items() if spec.is_collective]
    for name in group.operator or ():
        if not find_operator(name).is_collective:
            raise InvalidRequestError.of_field(
                "operator", f"{name} is no collective; those are {', '.join(known)}"
            )
    usual = ["all_reduce"] if outcome.overlap else known
    usual_dtype = DType.FP32 if is_cpu else DType.BF16
    nodes = _counts("nodes", group.nodes) or ((1,) if num_nodes == 1 else (1, num_nodes))
    # One device of each node is a group only where there are several nodes.
    usual_ranks = ((1,) if max(nodes) > 1 else ()) + ((2,) if is_cpu else (2, 4, 8))
    return CollectiveChoice(
        operators=tuple(group.operator or usual),
        dtype=find_member(DType, group.dtype, "dtype") if group.dtype else usual_dtype,
        ranks=_counts("ranks", group.ranks) or usual_ranks,
        nodes=nodes,
        sizes=parse_sizes(group.sizes or _usual_sizes(outcome, is_cpu=is_cpu)),
    )


def _usual_sizes(outcome: OutcomeOptions, *, is_cpu: bool) -> str:
    if outcome.overlap:
        return "64KiB,1MiB,16MiB" if is_cpu else "1MiB,16MiB,256MiB"
    return "1KiB,8KiB,64KiB,512KiB,4MiB,32MiB" if outcome.quick else "1KiB:1GiB"


def _counts(name: str, text: str) -> tuple[int, ...]:
    counts = parse_values(name, text) if text else ()
    if any(count < 1 for count in counts):
        raise InvalidRequestError.of_field(name, "must be at least 1")
    return counts


def _check_picture(outcome: OutcomeOptions) -> None:
    check_picture_option(outcome.picture)
    if outcome.picture is None:
        return
    if outcome.overlap:
        raise typer.BadParameter("--picture shows bandwidths, which --overlap does not time")


def _tell_failures(report: ProfileReport) -> None:
    """Tell how many failed, and what the profiler has to say."""
    if report.num_failed:
        note(f"{report.num_failed:,} cases failed, recorded in run {report.run_id}")
    for line in report.notes:
        note(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among the nodes; without a rendezvous it is the only one."""

    rendezvous: "RendezvousSpec | None" = None

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return self.rendezvous.num_nodes if self.rendezvous else 1

    @property
    def is_leader(self) -> bool:
        """Whether this process plans and records."""
        return self.rendezvous is None or self.rendezvous.is_leader


def find_place(config: AppConfig) -> Place:
    """Return this process's place by its settings, or as torchrun says.

    Where another process profiles, nobody meets here.

    Raises:
        InvalidRequestError: a setting is wrong.

    """
    if config.endpoints.profiler != EMBEDDED:
        return Place()
    from foretoken.profiler.ranks.rendezvous import RendezvousSpec, find_rendezvous

    given = config.profiler.get("rendezvous") or {}
    spec = schema.decode(RendezvousSpec, given, "profiler.rendezvous")
    return Place(rendezvous=find_rendezvous(spec, process_environment()))


def serve_place(place: Place, device: str, num_cpu_ranks: int) -> None:
    """Lend this node's devices to node 0 until it lets go; no catalog is opened.

    A CPU lends `num_cpu_ranks` processes.

    Raises:
        DeviceNotPresentError: this machine has no such device.
        ForetokenError: node 0 did not come, or is gone.

    """
    spec = place.rendezvous
    if spec is None or spec.local_rank > 0:
        # Another process of this node starts all its ranks.
        return
    from foretoken.profiler.local_device import find_local_device
    from foretoken.profiler.ranks.node import serve_node

    found = find_local_device(device)
    present = found.num_present if found.is_cuda else num_cpu_ranks
    num_ranks = spec.num_local_ranks or present
    with show_progress(f"node {spec.node_rank} of {spec.num_nodes}, for {spec.endpoint}") as update:
        progress = JobProgress(update.set, threading.Event())
        num_timed = serve_node(spec, num_ranks=num_ranks, is_cuda=found.is_cuda, progress=progress)
    note(f"node {spec.node_rank}: {num_timed} calls timed; node 0 records and shows them")
