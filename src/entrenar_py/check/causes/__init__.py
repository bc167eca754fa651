"""What explains a difference: comparisons of runs, what they presuppose, and explanations."""
