"""Fine-tuning of a small checkpoint that each run makes, and its independent oracles."""
