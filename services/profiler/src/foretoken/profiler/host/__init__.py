"""What the host takes beside the kernels: launches, a model's own code, sampling, text."""
