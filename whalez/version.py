"""The version, apart from the package so that reading it imports nothing."""

__version__ = "0.1.0"
