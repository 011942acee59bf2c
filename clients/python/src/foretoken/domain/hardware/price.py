"""What an hour of a device costs: price lists, one YAML file per provider in `prices/`.

A list of one's own is a file of the same form; see docs/how-to/plan-a-training-run.md.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foretoken.domain import schema
from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import load_yaml_folder, read_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePrice:
    """An hour of one device in USD, on demand and on the spot market (0: not on the list).

    `product` is what the provider calls it, `source` the page that says so, as it was on `date`
    (ISO 8601). Prices of whole machines are divided by their devices.
    """

    device: str
    usd_per_hour: float = 0.0
    spot_usd_per_hour: float = 0.0
    product: str = ""
    region: str = ""
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        """Refuse negative prices."""
        settle_devices(self, "device")
        InvalidRequestError.check(
            f"price of {self.device}",
            {
                "usd_per_hour": (self.usd_per_hour >= 0, "must not be negative"),
                "spot_usd_per_hour": (self.spot_usd_per_hour >= 0, "must not be negative"),
            },
        )

    def pick(self, *, is_spot: bool) -> float:
        """Return the price on that market; 0 where the list has none."""
        return self.spot_usd_per_hour if is_spot else self.usd_per_hour

    def describe(self, *, is_spot: bool) -> str:
        """Return where the price is from, for a reader who wants to check it."""
        market = "spot" if is_spot else "on demand"
        parts = (market, self.product, self.region, self.source, self.date)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceList:
    """What one provider charges for its devices, one price for each."""

    name: str
    provider: str = ""
    prices: tuple[DevicePrice, ...] = ()

    def __post_init__(self) -> None:
        """Refuse two prices of one device."""
        devices = [price.device for price in self.prices]
        twice = sorted({device for device in devices if devices.count(device) > 1})
        InvalidRequestError.check(
            f"price list {self.name}",
            {"prices": (not twice, f"{', '.join(twice)} is there more than once")},
        )

    def find(self, device: str, *, is_spot: bool) -> DevicePrice:
        """Return the price of a device on that market.

        Raises:
            InvalidRequestError: the list has none; the message says which it has.

        """
        offered = [price for price in self.prices if price.pick(is_spot=is_spot) > 0]
        for price in offered:
            if price.device == device:
                return price
        market = "spot price" if is_spot else "price"
        known = ", ".join(price.device for price in offered) or "no device"
        raise InvalidRequestError.of_field(
            "prices",
            f"{self.name} has no {market} of {device}, but of {known}: give"
            " prices.usd_per_hour or another list",
        )


@cache
def all_price_lists() -> dict[str, PriceList]:
    """Return every list by name: one file each in `prices/`."""
    return load_yaml_folder(PriceList, "foretoken.domain.hardware", "prices")


def find_price_list(name: str) -> PriceList:
    """Return the list of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, all_price_lists(), "prices.price_list", "price list")


def read_price_list(path: Path) -> PriceList:
    """Return the list in a user's file.

    Raises:
        InvalidRequestError: the file cannot be read, or a key or value in it is wrong.

    """
    content = read_yaml(path, "prices.price_list")
    return schema.decode(PriceList, {"name": path.stem, **content}, str(path))


def load_price_list(name: str) -> PriceList:
    """Return the list of that name, or the one in a file where the name is a YAML file's path.

    Raises:
        as `find_price_list` and `read_price_list`.

    """
    path = Path(name).expanduser()
    return read_price_list(path) if path.suffix in (".yaml", ".yml") else find_price_list(name)
