"""Texts and files of others (contracts, ledgers, paths, peers): opened within bounds, printed
visibly.
"""
