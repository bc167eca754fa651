"""The reference trainer as a service on several machines, behind the command `entrenar`."""
