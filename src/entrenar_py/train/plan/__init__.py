"""Foresees what a fine-tuning run needs: memory by device, bytes on the wire, and a strategy.

A model is built by its config.json alone, on torch's meta device. No weights are loaded.
"""
