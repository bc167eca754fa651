"""Probes of one thing each: products, operations, fallback, manifests, memory, the wire."""
