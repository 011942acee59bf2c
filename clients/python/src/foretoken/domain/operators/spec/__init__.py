"""What an operator is: its dimensions, work and sweeps."""
