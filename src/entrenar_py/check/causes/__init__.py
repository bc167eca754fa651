"""Causes of differences: comparisons of runs, what they presuppose, and explanations."""
