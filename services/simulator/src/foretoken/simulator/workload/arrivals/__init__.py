"""Arrival processes: one module each, with an `ARRIVAL`."""
