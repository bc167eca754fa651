"""What the checker and the trainer both speak: traces, scenarios, verdicts, errors, files."""
