"""Continuous-batching replicas behind a router, driven by events."""
