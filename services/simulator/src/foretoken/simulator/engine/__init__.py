"""A discrete-event engine: clock, events and random streams."""
