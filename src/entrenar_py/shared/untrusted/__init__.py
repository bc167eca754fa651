"""Texts and files from outside (contracts, ledgers, paths, peers).

They are opened within limits, and printed with every character visible.
"""
