"""Texts and files from outside (contracts, ledgers, paths, peers): opened within bounds, and
printed with every character visible.
"""
