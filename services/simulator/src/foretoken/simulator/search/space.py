"""The configurations worth asking about."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import gcd

from foretoken.domain.layout import ParallelLayout
from foretoken.domain.scenario import ServingScenario, TrainingScenario


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def serving_space(scenario: ServingScenario, num_devices: int) -> Iterator[ServingScenario]:
    """Yield the scenario in every layout of tp x pp x dp that uses all devices."""
    for tp, pp, dp in _degrees(num_devices):
        layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
        yield replace(scenario, name=_name(layout), layout=layout)


def training_space(scenario: TrainingScenario, num_devices: int) -> Iterator[TrainingScenario]:
    """Yield the scenario in every layout, micro batch size and recompute mode that divides.

    Context parallelism stays as it is, and expert parallelism as far as the ranks of a stage are
    enough for it. Beside no and full recomputation there is the scenario's own. All else stays.
    """
    cp = scenario.layout.cp
    if num_devices % cp:
        return
    for tp, pp, dp in _degrees(num_devices // cp):
        if scenario.global_batch_size % dp:
            continue
        layout = ParallelLayout(
            tp=tp, pp=pp, dp=dp, cp=cp, ep=gcd(scenario.layout.ep, tp * dp * cp)
        )
        for micro_batch_size in divisors(scenario.global_batch_size // dp):
            for recompute in _recompute_modes(scenario):
                name = f"{_name(layout)} mbs{micro_batch_size} recompute-{recompute}"
                yield replace(
                    scenario,
                    name=name,
                    layout=layout,
                    micro_batch_size=micro_batch_size,
                    recompute=recompute,
                    recompute_modules=scenario.recompute_modules * (recompute == "selective"),
                    recompute_layers=scenario.recompute_layers * (recompute != "none"),
                    partitions_activations=scenario.partitions_activations
                    and recompute == scenario.recompute,
                )


def _recompute_modes(scenario: TrainingScenario) -> Iterable[str]:
    return dict.fromkeys(("none", scenario.recompute, "full"))


def _name(layout: ParallelLayout) -> str:
    """Return the degrees; those of cp and ep where they are above one."""
    kept = [f"{axis}{layout.degree(axis)}" for axis in ("cp", "ep") if layout.degree(axis) > 1]
    return " ".join([f"tp{layout.tp} pp{layout.pp} dp{layout.dp}", *kept])


def _degrees(num_devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield tp, pp and dp whose product is the number of devices."""
    for tp in divisors(num_devices):
        for pp in divisors(num_devices // tp):
            yield tp, pp, num_devices // tp // pp
