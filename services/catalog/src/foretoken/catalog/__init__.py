"""Keeps every measurement, with provenance and quality flags."""
