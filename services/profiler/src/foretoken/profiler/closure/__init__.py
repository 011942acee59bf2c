"""Whole steps of a Hugging Face model, timed as truth to hold predictions to."""
