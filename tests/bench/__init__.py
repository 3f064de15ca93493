"""Benchmarks: ratios of rows that ran side by side, in one run, on the same data."""
