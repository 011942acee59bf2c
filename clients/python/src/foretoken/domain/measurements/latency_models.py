"""What latency models are trained on, and the versions of them."""

from dataclasses import dataclass

from foretoken.domain.alias import settle_devices
from foretoken.domain.requests.option import check_options, option


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """What to train on: everything, or one device or operator only."""

    device: str = option("", "Only this device's measurements.")
    operator: str = option("", "Only this operator.")
    seed: int = option(0, "Seed of folds and sampling.", minimum=0)

    def __post_init__(self) -> None:
        """Check the seed."""
        settle_devices(self, "device")
        check_options(self, "training")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelVersion:
    """A trained set of latency models. `created_at` is ISO 8601 UTC."""

    version: str
    created_at: str
    snapshot_hash: str
    num_rows: int
    is_active: bool
