"""Helpers that everything else uses: errors, files, serialisation, random numbers, metrics, events, provenance."""
