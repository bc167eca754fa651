"""All recipes, by module: each module here has a tuple `RECIPES`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.field.recipe import Recipe


def everything() -> list[Recipe]:
    """Return all recipes, in the order of their names."""
    modules = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    return sorted((one for each in modules for one in each.RECIPES), key=lambda one: one.name)
