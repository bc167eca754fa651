"""Launchers and ranks as forks of a process that has imported torch.

`check/command/fork_parent.py` is that process. It runs in the Python of the command, which need not
have entrenar-py: so all modules here need only the standard library, and import each other by
relative names. For each launch it forks four kinds of processes:

    parent -> warden (`subreaper.py`) -> command -> launcher: torchrun's own code
                                                 -> ranks, for which the launcher asks `command`

The launcher is the real one: rendezvous, restarts, signals, logs and error files are torchrun's.
Only where it would start an interpreter for a rank, by `subprocess.Popen`, it has one forked. Each
fork is made by a process with one thread that has computed nothing. A rank is forked if a new
interpreter would be in the same state once it had made the imports of the script: the same Python
with the same options, and no variable with another value that an import has read. Else it is
started as the launcher meant it, and a line `cold REASON` says why.

What a fork has in common with its siblings and a new interpreter has not: the order of sets, which
follows from hashes and addresses. So a script that may use this order is not forked at all
(`imports`).
"""
