"""The question that InternEvo's simulator asks: its points, in its terms."""
