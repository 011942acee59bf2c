"""Times operators on this machine's device and records them in the catalog."""
