"""The watch in production: at every k-th step, ranks exchange and judge digests of their state."""
