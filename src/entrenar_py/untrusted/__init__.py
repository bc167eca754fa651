"""What others wrote (contracts, ledgers, paths, peers): opened within bounds, printed visibly."""
