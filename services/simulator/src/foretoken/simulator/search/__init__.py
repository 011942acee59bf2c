"""Enumerate configurations and rank what the simulator says of each."""
