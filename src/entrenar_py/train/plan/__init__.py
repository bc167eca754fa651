"""Estimates the needs of a fine-tuning run: memory by device, bytes on the wire, and a strategy.

A model is built from its config.json alone, on torch's meta device. No weights are loaded.
"""
