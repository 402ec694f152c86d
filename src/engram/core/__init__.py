"""Helpers for all other packages: errors, files, settings, random numbers, metrics, events, provenance."""
