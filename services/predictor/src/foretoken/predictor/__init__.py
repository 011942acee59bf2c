"""Predicts operator latency from the catalog's measurements."""
