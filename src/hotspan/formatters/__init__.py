"""What users change requests and answers with: functions of `model.py`, or rules of `formatter.yaml`."""

from hotspan.formatters.formatter import input_formatter, output_formatter
from hotspan.formatters.formatters import Formatters, load_formatters

__all__ = ["Formatters", "input_formatter", "load_formatters", "output_formatter"]
