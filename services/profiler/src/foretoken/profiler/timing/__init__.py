"""How long one call takes: inputs, samples, which kernel ran, and what disturbed it."""
