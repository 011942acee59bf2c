"""Find the best serving deployments: enumerate, rule out, answer in closed form, simulate a few."""
