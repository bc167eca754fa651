"""The trainer: the same bits for any workers, and the command `entrenar`."""
