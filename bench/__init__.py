"""Measurements, each with a correctness gate before it and a ratio measured side by side in the same run."""
