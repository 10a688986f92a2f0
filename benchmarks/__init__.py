"""Drivers that validate and measure the project on a GPU; run them as `python -m benchmarks.NAME`."""
