"""The watch in production: digests of all ranks' state, exchanged and judged in every k-th step."""
