"""Drivers for the effects of the protocol's state machines, in virtual time or over TCP."""
