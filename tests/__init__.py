"""The tests: a package, so that no `tests` of an installed project can hide it. Its folders need no `__init__.py`."""
