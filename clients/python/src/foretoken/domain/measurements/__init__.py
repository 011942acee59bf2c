"""What was measured, and what is estimated from it."""
