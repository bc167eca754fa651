"""Fine-tuning of a small checkpoint, which each run creates, and independent oracles for it."""
