"""Imported first by a fork server, which then seldom searches for garbage while it loads the rest.

What it loads stays, and each process that it forks searches only among its own objects (`_run` in
`processes.py`).
"""

from entrenar_py.shared import process

process.collect_seldom()
