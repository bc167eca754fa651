"""Causes of differences between runs: comparisons, their presuppositions, and explanations."""
