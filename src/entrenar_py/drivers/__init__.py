"""Drivers carry out the effects of the protocol's machines: in virtual time, or over TCP."""
