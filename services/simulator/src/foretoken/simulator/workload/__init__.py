"""Workloads: arrival processes, lengths and traces, as columns of requests."""
