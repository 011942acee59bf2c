"""What simulations need of chance: random streams by name."""
