"""What run to plan, as a file and the options of `foretoken simulate run` say it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.app.cli.asked_option import Answers
from foretoken.app.scenario_file import build_training_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.price import load_price_list
from foretoken.domain.plugins import read_yaml
from foretoken.domain.requests.training_run import TrainingRunRequest

# Keys of `--set` that are of the run and not of the scenario.
_SECTIONS = ("failures", "sites", "prices")


def build_request(path: Path, changes: Mapping[str, Any], answers: Answers) -> TrainingRunRequest:
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
    asked = answers.read()
    _set_length(content, asked)
    prices = asked.pop("prices", {})
    if "price_list" in prices:
        prices["own_list"] = schema.encode(load_price_list(prices.pop("price_list")))
    for name, value in prices.items():
        schema.set_key(content, f"prices.{name}", value)
    content.update(asked)
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


def _set_length(content: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """Check the length: options name tokens or a dataset, and stand for either of the file's."""
    if "num_tokens" in asked or "dataset" in asked:
        content.pop("num_tokens", None)
        content.pop("dataset", None)
    if asked.get("num_tokens", 1) <= 0:
        raise InvalidRequestError.of_field("--tokens", "must be positive, as in --tokens 1e12")
    said = {**content, **asked}
    if bool(said.get("num_tokens")) == bool(said.get("dataset")):
        raise InvalidRequestError.of_field(
            "--tokens, --dataset",
            "say how much is trained, by one of them: --tokens 1e12, or --dataset slimpajama",
        )
