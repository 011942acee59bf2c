"""The question of InternEvo's simulator: its points, in its terms."""
