"""What `model.py` may import besides what is installed: its neighbours, and `djl_python`."""

import contextlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType
from typing import Any

_SHIM = "djl_python"
_SHIM_ROOT = Path(__file__).parents[2]
_importing = threading.Lock()


class FreshLoader(SourceFileLoader):
    """Compiles what stands in the file now, since a cached bytecode file may miss a change within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@contextlib.contextmanager
def neighbours_of(directory: Path) -> Iterator[None]:
    """While this lasts, the calling thread's imports find the modules in `directory`, and hotspan's `djl_python`.

    They come before whatever else has these names, and `sys.modules` has afterwards what it had before. So adapters
    whose neighbours have equal names get each its own, and LMI's `djl_python`, where somebody uses it too, is neither
    in the way nor touched. One thread at a time.
    """
    with _importing:
        finder = _Neighbours(directory)
        aside = finder.take()
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            finder.take()
            sys.modules.update(aside)


class _Neighbours(MetaPathFinder):
    def __init__(self, directory: Path) -> None:
        self._thread = threading.get_ident()
        own = _finder(directory)
        self._finders = {module.name: own for module in pkgutil.iter_modules([str(directory)])}
        self._finders[_SHIM] = _finder(_SHIM_ROOT)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._finders or threading.get_ident() != self._thread:
            return None
        return self._finders[fullname].find_spec(fullname)

    def take(self) -> dict[str, Any]:
        """The modules that have the names of neighbours, taken out of `sys.modules`."""
        names = [name for name in sys.modules if name.partition(".")[0] in self._finders]
        return {name: sys.modules.pop(name) for name in names}


def _finder(directory: Path) -> FileFinder:
    return FileFinder(str(directory), (ExtensionFileLoader, EXTENSION_SUFFIXES), (FreshLoader, SOURCE_SUFFIXES))
