"""Formats of engines' step records: one module each, with a `MEASURED_STEPS`."""
