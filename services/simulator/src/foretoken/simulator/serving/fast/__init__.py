"""The engines of a simulation as compiled code on flat arrays; the same steps as the reference."""
