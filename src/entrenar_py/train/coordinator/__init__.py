"""The state of the trainer's coordinator and workers, and their part in each step."""
