"""A project's configuration: `[tool.entrenar-check]` in pyproject.toml, or entrenar-check.toml.

The package finds the file, reads it with the place of every problem, and merges it with the command
line.
"""
