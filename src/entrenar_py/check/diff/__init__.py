"""`entrenar-check diff`: do two training runs differ by rounding, or by a bug, and where first?

Both runs are recorded at the borders of modules (`check/observing/borders.py`). `alignment` pairs
their values by samples and names. `judge` compares each distance with what rounding does to the
first run, which runs again with its last bits disturbed. `operations` finds the first operation.
"""
