"""The command line of `entrenar-check` as data: its options, and which of them go together.

Imports nothing heavy, so that `--help` is instant. The keys of a project's configuration, whose
values apply where the command line gives none, are parsed by these options too.
"""
