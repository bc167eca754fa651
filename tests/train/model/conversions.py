"""Loaded before forks that load checkpoints: transformers' rules to rename weights.

transformers builds them when a process loads its first checkpoint, which takes it 0.05 s.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")
