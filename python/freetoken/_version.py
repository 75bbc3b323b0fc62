"""The one place that holds the version. Imports nothing."""

__version__ = "0.3.0"
