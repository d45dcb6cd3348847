"""whalez: long-context prefill over a fleet of free-running rank processes."""

__version__ = "0.1.0"
