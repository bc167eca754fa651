"""A layer pipeline: the stages of one model on several machines, with the bits of one process."""
