"""Somebody's own trainer: a command that is launched, watched by its ranks' files, and judged."""
