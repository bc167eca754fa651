"""The checker: contracts, the clauses that judge traces, and the command `entrenar-check`."""
