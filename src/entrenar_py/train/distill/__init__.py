"""Distillation: a teacher's shards of soft targets, their production, and the student's loss."""
