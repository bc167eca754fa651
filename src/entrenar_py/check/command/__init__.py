"""Launching a user's own trainer, reading its ranks' files, and judging its runs."""
