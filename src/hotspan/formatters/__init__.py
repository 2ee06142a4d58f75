"""What users change requests and answers with: functions of `model.py`, or rules of `formatter.yaml`."""

from hotspan.formatters.formatters import Formatters, load_formatters
from hotspan.formatters.marks import input_formatter, output_formatter

__all__ = ["Formatters", "input_formatter", "load_formatters", "output_formatter"]
