"""Drivers give the protocol's machines clocks, connections and hands: simulated, or real."""
