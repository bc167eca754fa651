"""The command line of `entrenar-check` as data: which options there are, which go together.

Imports nothing heavy, so that `--help` is instant. The configuration of a project, which lies below
the command line, reads its keys by these options too.
"""
