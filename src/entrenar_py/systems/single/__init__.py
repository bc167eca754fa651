"""Trainers whose workers all live in this process: the reference, and its textbook oracle."""
