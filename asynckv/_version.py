"""The version, in one place: setup.py and the package both read it."""

__version__ = "0.1.0"
