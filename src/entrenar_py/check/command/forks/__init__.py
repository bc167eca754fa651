"""Launchers and ranks as forks of a process that has imported torch.

`check/command/fork_parent.py` is that process. It runs in the Python of the command, which may lack
entrenar-py. So all modules here need only the standard library, and import each other by relative
names. For each launch it forks four kinds of processes:

    parent -> warden (`subreaper.py`) -> command -> launcher: torchrun's own code
                                                 -> ranks, which the launcher requests

The launcher is the real one: rendezvous, restarts, signals, logs and error files are torchrun's.
Only where it would start an interpreter for a rank, with `subprocess.Popen`, the rank is forked
instead. Each fork is made by a process with one thread that has computed nothing. A rank is forked
only if a new interpreter would be in the same state after the imports of the script. That requires
the same Python with the same options, and equal values of all variables that an import has read.
Otherwise the rank is started as the launcher intended, and a line `cold REASON` says why.

A fork has the same order of sets as its siblings, which a new interpreter has not: it follows from
hashes and addresses. So a script that may depend on this order is not forked at all (`imports`).
"""
