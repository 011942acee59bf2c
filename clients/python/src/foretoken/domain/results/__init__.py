"""What a simulation returns."""
