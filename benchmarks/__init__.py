"""Drivers that validate and measure the project on a GPU: `python -m benchmarks.NAME`."""
