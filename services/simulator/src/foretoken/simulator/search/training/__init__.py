"""Search of training strategies: all in closed form, the best event by event."""
