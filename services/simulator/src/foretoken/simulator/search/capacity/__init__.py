"""The highest rate at which a deployment meets its targets."""
