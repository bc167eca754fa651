"""Launching of a user's own trainer, reading of its ranks' files, and judging of its runs."""
