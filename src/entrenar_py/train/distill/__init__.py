"""Soft targets: a teacher's shards, what makes them, and the student that learns from them."""
