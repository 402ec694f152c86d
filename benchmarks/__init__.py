"""How fast engram is, measured: `python -m benchmarks`. docs/benchmark.md says what each number means."""
