"""Experiments: configuration and recipes of a run, its stages in order, several runs at once, the base-stage cache."""
