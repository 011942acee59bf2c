"""The starter catalog that is installed with the program: measurements for a home without any."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from foretoken.app.config import EMBEDDED, AppConfig
from foretoken.domain.plugins import parse_yaml_value

# The distribution of `pip install 'foretoken[starter]'`, and the folder of its dataset.
_PACKAGE, _FOLDER = "foretoken_starter", "data"
_MANIFEST = "_manifest.json"
_VARIABLE = "FORETOKEN_PREDICTOR__STARTER"


def with_starter(config: AppConfig, environment: Mapping[str, str]) -> AppConfig:
    """Return a configuration whose predictor knows the starter that is installed, if one is.

    A configuration or an environment that says where it lies, or that there is none, is obeyed.
    """
    if "starter" in config.predictor or config.endpoints.predictor != EMBEDDED:
        return config
    said = environment.get(_VARIABLE)
    folder = parse_yaml_value(said, _VARIABLE) if said else _find_installed()
    return replace(config, predictor={**config.predictor, "starter": folder}) if folder else config


def _find_installed() -> str:
    """Return the folder of the dataset; empty where it is not installed."""
    found = importlib.util.find_spec(_PACKAGE)
    folder = Path(found.origin).parent / _FOLDER if found and found.origin else None
    return str(folder) if folder and (folder / _MANIFEST).is_file() else ""


def describe_starter(folder: Path) -> str:
    """Return what a starter catalog holds and whose figures they are."""
    manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    origins = "; ".join(f"{run['source']}, {run['licence']}" for run in manifest["runs"])
    return f"{manifest['num_rows']:,} measurements ({origins})"


def tell_once(home: Path, folder: Path) -> str:
    """Return what to tell of the starter, the first time in a home; then nothing."""
    told = home / "predictor" / "starter" / "told"
    if told.exists():
        return ""
    told.parent.mkdir(parents=True, exist_ok=True)
    told.touch()
    return (
        f"what was not measured here is estimated from the starter catalog:"
        f" {describe_starter(folder)}; --no-starter switches it off"
    )
