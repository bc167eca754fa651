"""`observe` as callbacks for trainers that own the training loop, each with an extra of its own."""
