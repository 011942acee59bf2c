"""Price lists and datasets: what the files say, and what a user's list may say."""

import re
from datetime import date
from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.hardware.price import (
    DevicePrice,
    PriceList,
    all_price_lists,
    find_price_list,
    load_price_list,
)
from foretoken.domain.requests.dataset import all_datasets, find_dataset

_PRICES = [(name, price) for name, listed in all_price_lists().items() for price in listed.prices]


@pytest.mark.parametrize(("name", "price"), _PRICES)
def test_every_price_is_of_a_known_device_and_says_its_source(
    name: str, price: DevicePrice
) -> None:
    assert price.device in all_devices(), name
    assert "https://" in price.source
    assert date.fromisoformat(price.date) >= date(2026, 1, 1)
    assert price.product
    assert price.usd_per_hour > 0


@pytest.mark.parametrize(("name", "price"), _PRICES)
def test_a_price_of_a_machine_is_divided_by_its_devices(name: str, price: DevicePrice) -> None:
    """Products that say what the whole machine costs say it of so many devices, or of eight."""
    found = re.search(r"(?:(\d+) devices )?for ([\d.]+)(?: \(spot ([\d.]+)\))?$", price.product)
    if found is None:
        return
    devices = int(found[1] or 8)
    assert pytest.approx(float(found[2]) / devices, rel=1e-5) == price.usd_per_hour, name
    if found[3]:
        assert pytest.approx(float(found[3]) / devices) == price.spot_usd_per_hour


def test_spot_prices_are_below_those_on_demand() -> None:
    both = [price for _, price in _PRICES if price.spot_usd_per_hour]
    assert both
    assert all(price.spot_usd_per_hour < price.usd_per_hour for price in both)


def test_a_list_finds_a_device_on_its_market() -> None:
    listed = find_price_list("coreweave")
    assert listed.find("h100_sxm", is_spot=False).usd_per_hour == 6.155
    assert listed.find("h100_sxm", is_spot=True).spot_usd_per_hour == 2.46375
    with pytest.raises(InvalidRequestError, match="no spot price of l40s, but of b200"):
        listed.find("l40s", is_spot=True)


def test_an_unknown_list_names_the_nearest() -> None:
    with pytest.raises(UnknownPluginError, match="did you mean lambda"):
        find_price_list("lamda")


def test_a_file_of_the_user_s_is_a_list(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("prices:\n  - {device: h100_sxm, usd_per_hour: 1.5}\n")
    listed = load_price_list(str(path))
    assert listed == PriceList(
        name="ours", prices=(DevicePrice(device="h100_sxm", usd_per_hour=1.5),)
    )
    assert load_price_list("lambda") is find_price_list("lambda")


def test_a_file_with_a_wrong_key_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("prices:\n  - {device: h100_sxm, price: 1.5}\n")
    with pytest.raises(InvalidRequestError, match=r"ours\.yaml.*price"):
        load_price_list(str(path))


def test_a_device_has_one_price_in_a_list() -> None:
    price = DevicePrice(device="h100_sxm", usd_per_hour=1)
    with pytest.raises(InvalidRequestError, match="h100_sxm is there more than once"):
        PriceList(name="twice", prices=(price, price))


def test_every_dataset_says_who_counted_and_when() -> None:
    for name, dataset in all_datasets().items():
        assert dataset.num_tokens > 0, name
        assert dataset.source, name
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", dataset.date), name


def test_datasets_are_found_by_name() -> None:
    assert find_dataset("pile").num_tokens == 371e9
    assert find_dataset("llama-3").num_tokens == 15.6e12
