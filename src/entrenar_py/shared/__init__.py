"""What the checker and the trainer share: traces, scenarios, verdicts, errors, files."""
