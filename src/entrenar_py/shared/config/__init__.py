"""Configuration read with places: what was given, where, and what is allowed."""
