"""The types of errors that a package defines."""

import importlib
import pkgutil
from types import ModuleType


def errors_of(package: ModuleType) -> set[type[Exception]]:
    """Return those of ``package`` and of the packages below it."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [importlib.import_module(module.name) for module in found if "__main__" not in module.name]
    return {
        item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Exception) and item.__module__ == module.__name__
    }
