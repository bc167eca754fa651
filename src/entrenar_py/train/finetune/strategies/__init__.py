"""Training by ranks that torchrun starts: each strategy in one file, on torch's own collectives."""
