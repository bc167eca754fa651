"""The checker: contracts, the checks that judge traces, and the command `entrenar-check`."""
