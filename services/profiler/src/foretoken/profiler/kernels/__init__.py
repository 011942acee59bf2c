"""One module per operator that runs on one device, each with a `KERNEL`."""
