"""`model.py`: users' own formatters."""

import ast
import contextlib
import inspect
import itertools
import json
import logging
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hotspan.core.errors import ConfigError
from hotspan.formatters.formatter import MARKS, Context, Formatter, Phase, line_in

logger = logging.getLogger(__name__)

_SAGEMAKER = {Phase.INPUT: "input_fn", Phase.OUTPUT: "output_fn"}
_NEVER_CALLED = ("model_fn", "predict_fn", "transform_fn")
_JSON = "application/json"
_numbers = itertools.count(1)
_SHIM = "djl_python"
_SHIM_ROOT = Path(__file__).parents[2]
_importing = threading.Lock()


class AttributeDict(dict[str, Any]):
    """An answer as users' formatters expect it: a dict whose fields are attributes too, at every depth.

    LMI says that an output formatter gets a dict, and gives it vLLM's Pydantic objects: `model.py` files out there
    read `answer["choices"]` or `answer.choices`, and set either. Both work on this.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the answer has no {name}: it has {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The plain dict, as Pydantic gives it."""
        return dict(self)


def as_answer(value: Any) -> Any:
    """`value` with an AttributeDict in the place of each dict."""
    if isinstance(value, dict):
        return AttributeDict({name: as_answer(item) for name, item in value.items()})
    if isinstance(value, list):
        return [as_answer(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class Script:
    """A `model.py` that was executed. Its module stays registered until `close`, since classes in it look it up."""

    module: str
    formatters: Mapping[Phase, Formatter]

    def close(self) -> None:
        """Let the module go; calls that run have what they need."""
        sys.modules.pop(self.module, None)


def load_script(file: Path) -> Script:
    """What a `model.py` gives when it is executed: here, once, in a module of its own.

    Blocks: as long as the user's code takes to load.
    Raises: ConfigError that names the file, and the line if it is the user's code that fails.
    """
    module = _executed(file)
    try:
        return Script(module.__name__, _formatters(file, module))
    except ConfigError:
        del sys.modules[module.__name__]
        raise


def check_script(file: Path) -> None:
    """Raise ConfigError for a `model.py` that `load_script` would refuse, as far as reading it tells."""
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} can't be loaded: {error}. Correct it, or take the file away") from error
    if any(getattr(each, "name", None) == "handle" for each in body):
        raise _answers(file)


def _answers(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} has a function handle, which would answer in the engine's place; hotspan calls formatters only."
        " Take it away, and mark what changes requests or answers with @input_formatter or @output_formatter"
    )


def _executed(file: Path) -> ModuleType:
    name = f"hotspan_model_py_{next(_numbers)}"  # without the adapter's name, of which a-b and a.b would make the same
    loader = FreshLoader(name, str(file))
    spec = ModuleSpec(name, loader, origin=str(file))
    spec.has_location = True  # so that the module has its __file__
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        with neighbours_of(file.parent):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the boundary to users' code, of which anything may come
        del sys.modules[name]
        problem = f"{file} can't be loaded: it failed{line_in(file, error)} with {type(error).__name__}: {error}"
        raise ConfigError(f"{problem}. {_remedy(error)}") from error
    return module


def _remedy(error: BaseException) -> str:
    if not isinstance(error, ImportError):
        return "Correct it, or take the file away"
    if (error.name or "").partition(".")[0] == "djl_python":
        return (
            "Of djl_python, hotspan has input_parser.input_formatter, output_formatter.output_formatter and"
            " encode_decode.decode: formatters take and return dicts"
        )
    return "Install what it imports where hotspan is installed, which does not install any requirements.txt"


def _formatters(file: Path, module: ModuleType) -> dict[Phase, Formatter]:
    if callable(getattr(module, "handle", None)):
        raise _answers(file)
    formatters = {}
    for phase in Phase:
        candidates = _candidates(module, phase)
        if len(candidates) > 1:
            names = " and ".join(_name(function) for function in candidates)
            raise ConfigError(f"{file} has several {phase} formatters, {names}: keep one")
        for function in candidates:
            apply = _marked(file, phase, function) if _is_marked(function, phase) else _sagemaker(file, phase, function)
            name = f"{file.parent.name}/{file.name}:{_name(function)}"
            formatters[phase] = Formatter(phase, name, file, apply, _is_async(function))
    ignored = [name for name in _NEVER_CALLED if callable(getattr(module, name, None))]
    if ignored or not formatters:
        names = ",".join(formatters) or "none"
        logger.warning("formatter_file_unused file=%s formatters=%s never_called=%s", file, names, ",".join(ignored))
    return formatters


def _candidates(module: ModuleType, phase: Phase) -> list[Callable[..., Any]]:
    """What could be the formatter: marked functions, a function under two names counting once, and SageMaker's."""
    found = {id(value): value for value in vars(module).values() if callable(value) and _is_marked(value, phase)}
    plain = getattr(module, _SAGEMAKER[phase], None)
    if callable(plain):
        found[id(plain)] = plain
    return list(found.values())


def _is_marked(function: Any, phase: Phase) -> bool:
    return getattr(function, MARKS[phase], False) is True


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _offers(context: Context) -> dict[str, Any]:
    """What a marked function may take besides the value; `properties` is LMI's word for a request's headers."""
    return {"tokenizer": context.tokenizer, "headers": context.headers, "properties": context.headers}


_OFFERED = frozenset(_offers(Context(None, {}, None, 0.0)))


def _marked(file: Path, phase: Phase, function: Callable[..., Any]) -> Callable[[Any, Context], Any]:
    """How a marked function is called: with the value, and as keywords what it accepts of what is offered."""
    parameters = list(inspect.signature(function).parameters.values())
    accepted = _OFFERED - {parameter.name for parameter in parameters[:1]}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        accepted &= {parameter.name for parameter in parameters if parameter.kind in kinds}
    _check_call(
        file, function, f"the value, and {', '.join(sorted(_OFFERED))} if it likes", None, **dict.fromkeys(accepted)
    )

    def apply(value: Any, context: Context) -> Any:
        offers = _offers(context)
        given = as_answer(value) if phase is Phase.OUTPUT else value
        return function(given, **{name: offers[name] for name in accepted})

    return apply


def _sagemaker(file: Path, phase: Phase, function: Callable[..., Any]) -> Callable[[Any, Context], Any]:
    """How SageMaker calls its functions: with the body and its content type, with the answer and what is accepted."""
    if phase is Phase.INPUT:
        _check_call(file, function, "input_data and content_type", None, None)
        return lambda value, context: function(json.dumps(value).encode(), context.headers.get("content-type", _JSON))
    _check_call(file, function, "prediction and accept", None, None)
    return lambda value, context: function(as_answer(value), context.headers.get("accept", _JSON))


def _check_call(file: Path, function: Callable[..., Any], wanted: str, *values: Any, **keywords: Any) -> None:
    try:
        inspect.signature(function).bind(*values, **keywords)
    except TypeError as error:
        raise ConfigError(
            f"{file} has a formatter {_name(function)} that nobody can call: {error}. Let it take {wanted}"
        ) from None


# -- what `model.py` may import besides what is installed: its neighbours, and `djl_python` ---------------------------


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
