"""What to know of a planned run: what it rests on, and what it leaves out."""

from collections.abc import Iterator, Sequence

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.dataset import find_dataset
from foretoken.domain.requests.training_run import RunSize, TrainingRunRequest
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.training.run.failures import FailureModel


def list_notes(
    request: TrainingRunRequest, failures: FailureModel, step: TrainingReport
) -> tuple[str, ...]:
    """Return the remarks of a run, those of its step last."""
    return (
        *_tokens(request),
        *_failures(request, failures),
        *_sites(request),
        *_money(request),
        *step.notes,
    )


def describe_quickest(sizes: Sequence[RunSize], target_days: float) -> str:
    """Return what to say where no number of devices meets a target date."""
    running = [size for size in sizes if size.days]
    if not running:
        return f"no number of replicas can run, let alone in {target_days:g} days"
    quickest = min(running, key=lambda size: size.days)
    return (
        f"no number of replicas is done in {target_days:g} days: the quickest are"
        f" {quickest.num_devices:,} devices, in {quickest.days:.4g} days; a larger"
        " global_batch_size gives more of them work, a quicker step (`foretoken search training`)"
        " helps all"
    )


def _tokens(request: TrainingRunRequest) -> Iterator[str]:
    if not request.dataset:
        return
    dataset = find_dataset(request.dataset)
    counted = f"counted with the tokenizer of {dataset.tokenizer}" if dataset.tokenizer else ""
    count = counted or "its source does not say by which tokenizer"
    yield (
        f"{dataset.name} has {dataset.num_tokens:.4g} tokens ({dataset.date}), {count}: another"
        " tokenizer makes more or fewer of the same text"
    )


def _failures(request: TrainingRunRequest, failures: FailureModel) -> Iterator[str]:
    rules = request.failures
    if not rules.device_mtbf_hours:
        yield "nothing fails: say how often a device does with failures.device_mtbf_hours"
        return
    asked_s = rules.checkpoint_interval_s
    if asked_s and asked_s < failures.shortest_s:
        yield (
            f"a checkpoint every {asked_s:g} s cannot be: one takes longer to write, so they follow"
            f" each other every {failures.shortest_s:.3g} s"
        )
    if not rules.checkpoint_s:
        num_devices = request.scenario.layout.num_devices
        rate = rules.checkpoint_bytes_per_s * num_devices
        yield (
            f"checkpoints are written at {format_number(rate / 1e9, 4)} GB/s by {num_devices:,}"
            " devices together: give failures.checkpoint_s where the storage is slower"
        )
    if request.prices.is_spot:
        yield (
            "a spot market takes devices back: failures.device_mtbf_hours must count that as well"
        )


def _sites(request: TrainingRunRequest) -> Iterator[str]:
    sites, scenario = request.sites, request.scenario
    if sites.num_sites == 1:
        return
    batch = sites.num_sites * scenario.global_batch_size
    yield (
        f"{sites.num_sites} sites with {scenario.global_batch_size:,} samples each make a step of"
        f" {batch:,}"
    )
    if sites.sync_steps > 1:
        yield (
            f"the sites' models differ for {sites.sync_steps:,} steps between sums: nothing is said"
            " of what that does to the loss"
        )


def _money(request: TrainingRunRequest) -> Iterator[str]:
    prices = request.prices
    if not (prices.usd_per_hour or prices.own_list or prices.price_list):
        yield "devices are not priced: name a list with prices.price_list (`foretoken list prices`)"
    if not prices.device_w:
        yield "devices draw the power limit of their data sheet all the time: energy is the most"
