"""Systems that test one thing without training: products, fallback, memory, the wire and others."""
