"""Benchmarks: each figure beside a named reference, measured in the same run. They gate nothing."""
