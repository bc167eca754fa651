"""A project's configuration: `[tool.entrenar-check]` in pyproject.toml, or entrenar-check.toml.

This package finds the file, reads it with the place of every problem, and merges its values with
the command line.
"""
