"""Configuration files, read with the place of each value and with messages on wrong values."""
