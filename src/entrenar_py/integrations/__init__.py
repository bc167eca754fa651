"""`observe` as a callback for libraries that own the training loop."""
