"""Schedulers: one module each, with a `SCHEDULER`."""
