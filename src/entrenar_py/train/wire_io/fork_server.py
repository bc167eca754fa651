"""Garbage collection in a fork server: importing this first makes collections rare while it loads.

The loaded modules stay, and each forked process collects only its own objects (`_run` in
`processes.py`).
"""

from entrenar_py.shared import process

process.collect_seldom()
