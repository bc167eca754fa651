"""`observe` as callbacks for trainers that own the training loop."""
