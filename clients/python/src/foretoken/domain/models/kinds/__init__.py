"""Kinds of layers, one file each: formulas of weights, state and operators, with their source."""
