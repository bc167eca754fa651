"""Launchers and ranks as forks of a process that has imported torch.

`check/command/fork_parent.py` is that process. It runs in the Python of the command, which may lack
entrenar-py. So all modules here need only the standard library, and import each other by relative
names. For each launch, four kinds of processes are forked:

    parent -> warden (`subreaper.py`) -> command -> launcher: torchrun's own code
                                                 -> ranks, which the launcher requests

The launcher is the real one: rendezvous, restarts, signals, logs and error files are torchrun's.
Only its `subprocess.Popen` is replaced: where the launcher would start an interpreter for a rank,
the rank is forked instead. The forking process has a single thread, and has computed nothing. A
rank is forked only if a new interpreter would be in the same state after the imports of the script.
That requires the same Python with the same options, and equal values of all variables that an
import has read. Otherwise the rank is started as the launcher intended, and a line `cold REASON`
says why.

The order of a set follows from hashes and addresses. These are equal in all forks, but differ
between new interpreters. So a script that may depend on such an order is not forked at all
(`imports`).
"""
