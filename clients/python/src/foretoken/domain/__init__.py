"""The vocabulary every service shares; standard library only, plus YAML for the data files."""
