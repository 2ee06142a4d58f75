"""The version of hotspan, for modules below the package's own interface."""

from typing import Final

__version__: Final = "0.1.0"
