"""The watch in production: in every k-th step, ranks exchange and judge digests of their state."""
