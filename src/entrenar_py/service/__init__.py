"""The reference trainer as a service on several machines: what the command `entrenar` runs."""
