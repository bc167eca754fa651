"""`observe` for trainers that own the loop: callbacks of theirs, each with an extra of its own."""
