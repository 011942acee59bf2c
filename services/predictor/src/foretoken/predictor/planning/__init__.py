"""Which points to profile next."""
