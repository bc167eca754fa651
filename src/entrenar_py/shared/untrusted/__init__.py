"""Safe handling of texts and files from outside (contracts, ledgers, paths, messages of peers).

Files are opened within limits, and texts are printed with every character visible.
"""
