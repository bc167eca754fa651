"""A layer pipeline: the stages of one model on several machines, trained as one process would."""
