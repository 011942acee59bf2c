"""What run to plan, as the options of `foretoken simulate run` say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.app.scenario_file import build_training_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.plugins import read_yaml
from foretoken.domain.price import load_price_list
from foretoken.domain.training_run import TrainingRunRequest

_LENGTH, _DATE, _MONEY = "How much is trained", "When it is to be done", "What it costs"
# Keys of `--set` that are of the run and not of the scenario.
_SECTIONS = ("failures", "sites", "prices")


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """How long the run is."""

    tokens: Annotated[
        float | None, typer.Option(help="Tokens to train on: `2e12`.", rich_help_panel=_LENGTH)
    ] = None
    dataset: Annotated[
        str,
        typer.Option(
            help="Train on a known dataset instead (`foretoken list datasets`).",
            rich_help_panel=_LENGTH,
        ),
    ] = ""
    epochs: Annotated[
        float | None,
        typer.Option(
            help="How often the dataset is gone through (default: once).",
            rich_help_panel=_LENGTH,
        ),
    ] = None
    target_days: Annotated[
        float | None,
        typer.Option(
            help="Tell the fewest devices that are done in so many days, the batch unchanged.",
            rich_help_panel=_DATE,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MoneyOptions:
    """What devices cost."""

    price_list: Annotated[
        str,
        typer.Option(
            help="Price devices by a list (`foretoken list prices`), or by a YAML file of yours.",
            rich_help_panel=_MONEY,
        ),
    ] = ""
    spot: Annotated[
        bool, typer.Option("--spot", help="Take the spot prices.", rich_help_panel=_MONEY)
    ] = False


def build_request(
    path: Path, changes: Mapping[str, Any], length: LengthOptions, money: MoneyOptions
) -> TrainingRunRequest:
    """Return the request of a file, with what options and changes say instead.

    The file is a scenario, or a request with the key `scenario`: a scenario, or its file beside it.

    Raises:
        InvalidRequestError: an unknown key or a wrong value, with its place.

    """
    content, scenario, scenario_path = _read(path)
    of_scenario = {}
    for dotted, value in changes.items():
        if dotted.partition(".")[0] in _SECTIONS:
            schema.set_key(content, dotted, value)
        else:
            of_scenario[dotted] = value
    _set_length(content, length)
    _set_money(content, money)
    built = build_training_scenario(scenario, of_scenario, scenario_path)
    return schema.decode(TrainingRunRequest, {**content, "scenario": schema.encode(built)})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Return a request without its scenario, the scenario, and the file that it is in."""
    content = read_yaml(path, "scenario")
    if "scenario" not in content:
        return {}, content, path
    scenario = content.pop("scenario")
    if isinstance(scenario, str):
        beside = path.parent / scenario
        return content, read_yaml(beside, "scenario"), beside
    return content, dict(scenario), path


def _set_length(content: dict[str, Any], length: LengthOptions) -> None:
    """Write what options say of the length: either tokens or a dataset, if they name one only."""
    if length.tokens is not None or length.dataset:
        content.pop("num_tokens", None)
        content.pop("dataset", None)
    asked = {
        "num_tokens": length.tokens,
        "dataset": length.dataset or None,
        "num_epochs": length.epochs,
        "target_days": length.target_days,
    }
    content.update({name: value for name, value in asked.items() if value is not None})
    if length.tokens is not None and length.tokens <= 0:
        raise InvalidRequestError.of_field("--tokens", "must be positive, as in --tokens 1e12")
    if bool(content.get("num_tokens")) == bool(content.get("dataset")):
        raise InvalidRequestError.of_field(
            "--tokens, --dataset",
            "say how much is trained, by one of them: --tokens 1e12, or --dataset slimpajama",
        )


def _set_money(content: dict[str, Any], money: MoneyOptions) -> None:
    if money.spot:
        schema.set_key(content, "prices.is_spot", value=True)
    if money.price_list:
        listed = schema.encode(load_price_list(money.price_list))
        schema.set_key(content, "prices.own_list", listed)
