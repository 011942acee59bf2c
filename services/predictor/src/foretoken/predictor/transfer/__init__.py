"""What measurements of other devices and operators say of a device with few or none of its own."""

from foretoken.predictor.transfer.efficiency_prior import (
    TransferModel,
    default_transfer,
    train_transfers,
    transfer_names,
)

__all__ = ["TransferModel", "default_transfer", "train_transfers", "transfer_names"]
