"""Devices and topologies: YAML files with a source for every number."""
