"""One module per pipeline schedule, each with a `SCHEDULE`."""
