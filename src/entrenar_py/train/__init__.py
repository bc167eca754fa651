"""The trainer, with the same bits for any number of workers, and the command `entrenar`."""
