"""What the host takes in addition to the kernels: launches, a model's own code, sampling, text."""
