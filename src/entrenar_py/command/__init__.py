"""Runs of a user's own trainer: its command is launched, its ranks' files read, and judged."""
