"""Formats of measured serving runs: one module each, with a `MEASURED_RUN`."""
