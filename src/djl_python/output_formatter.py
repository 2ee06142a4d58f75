"""The decorator of output formatters."""

from hotspan.formatters import output_formatter

__all__ = ["output_formatter"]
