"""The decorator of input formatters."""

from hotspan.formatters import input_formatter

__all__ = ["input_formatter"]
