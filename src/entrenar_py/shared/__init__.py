"""Records and tools that checker and trainer share: traces, scenarios, verdicts, errors, files."""
