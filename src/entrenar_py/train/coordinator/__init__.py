"""The coordinator and the workers of the trainer: what they hold, and what they make of a step."""
