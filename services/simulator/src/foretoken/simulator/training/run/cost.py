"""What a run costs: hours of devices, and their power."""

import math
from collections import Counter
from dataclasses import dataclass

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.price import PriceList, find_price_list
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import PriceRules

_W_PER_KW = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCost:
    """What one device costs in an hour, the mean of those of a run; `source` says who says so."""

    usd_per_hour: float
    kwh_per_hour: float
    usd_per_kwh: float
    source: str

    def energy_kwh(self, device_hours: float) -> float:
        """Return the energy of so many hours, with what the data centre takes."""
        return device_hours * self.kwh_per_hour

    def energy_usd(self, device_hours: float) -> float:
        """Return what the energy costs, 0 where the price has it in."""
        return self.energy_kwh(device_hours) * self.usd_per_kwh

    def usd(self, device_hours: float) -> float:
        """Return what so many hours cost, energy included."""
        return device_hours * self.usd_per_hour + self.energy_usd(device_hours)


def find_cost(scenario: TrainingScenario, rules: PriceRules) -> DeviceCost:
    """Return what an hour of a scenario's devices costs, by the rules.

    Raises:
        UnknownPluginError: no price list of that name.
        InvalidRequestError: the list has no price of a device on that market.

    """
    shares = device_shares(scenario)
    most_w = scenario.power_limit_w or math.inf
    watts = sum(
        share * (rules.device_w or min(find_device(name).tdp_w, most_w))
        for name, share in shares.items()
    )
    usd_per_hour, source = _price(shares, rules)
    return DeviceCost(
        usd_per_hour=usd_per_hour,
        kwh_per_hour=watts * rules.pue / _W_PER_KW,
        usd_per_kwh=rules.usd_per_kwh,
        source=source,
    )


def device_shares(scenario: TrainingScenario) -> dict[str, float]:
    """Return the share that each kind of device has in a scenario's, by its own name."""
    names = [find_device(name).name for name in scenario.stage_devices or (scenario.device,)]
    return {name: count / len(names) for name, count in Counter(names).items()}


def _price(shares: dict[str, float], rules: PriceRules) -> tuple[float, str]:
    if rules.usd_per_hour:
        return rules.usd_per_hour, "given"
    listed: PriceList | None = rules.own_list
    if listed is None:
        if not rules.price_list:
            return 0.0, ""
        listed = find_price_list(rules.price_list)
    found = {name: listed.find(name, is_spot=rules.is_spot) for name in shares}
    usd_per_hour = sum(
        share * found[name].pick(is_spot=rules.is_spot) for name, share in shares.items()
    )
    words = "; ".join(
        f"{name}: {price.describe(is_spot=rules.is_spot)}" for name, price in found.items()
    )
    return usd_per_hour, f"{listed.name}: {words}"
