"""Benchmarks: each prints a table and writes bench/results/NAME.json; their numbers stand in docs/benchmarks.md."""
