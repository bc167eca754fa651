"""Training with ranks that torchrun starts: one file for each strategy, on torch's collectives."""
