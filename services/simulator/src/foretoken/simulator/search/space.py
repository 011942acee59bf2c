"""The configurations worth asking about."""

from collections.abc import Iterator
from dataclasses import replace

from foretoken.domain.layout import ParallelLayout
from foretoken.domain.scenario import ServingScenario, TrainingScenario


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def serving_space(scenario: ServingScenario, num_devices: int) -> Iterator[ServingScenario]:
    """Yield the scenario in every layout of tp x pp x dp that uses all devices."""
    for layout in _layouts(num_devices):
        name = f"tp{layout.tp} pp{layout.pp} dp{layout.dp}"
        yield replace(scenario, name=name, layout=layout)


def training_space(scenario: TrainingScenario, num_devices: int) -> Iterator[TrainingScenario]:
    """Yield the scenario in every layout, micro batch size and recompute mode that divides."""
    for layout in _layouts(num_devices):
        if scenario.global_batch_size % layout.dp:
            continue
        for micro_batch_size in divisors(scenario.global_batch_size // layout.dp):
            for recompute in ("none", "full"):
                name = (
                    f"tp{layout.tp} pp{layout.pp} dp{layout.dp}"
                    f" mbs{micro_batch_size} recompute-{recompute}"
                )
                yield replace(
                    scenario,
                    name=name,
                    layout=layout,
                    micro_batch_size=micro_batch_size,
                    recompute=recompute,
                )


def _layouts(num_devices: int) -> Iterator[ParallelLayout]:
    for tp in divisors(num_devices):
        for pp in divisors(num_devices // tp):
            yield ParallelLayout(tp=tp, pp=pp, dp=num_devices // tp // pp)
