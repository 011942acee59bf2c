"""What a model does not know: how far a call is from measurements, and how wrong it may be."""
