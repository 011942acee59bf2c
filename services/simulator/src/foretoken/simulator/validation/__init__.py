"""What a simulation says of a run that was measured, and where the two part."""
