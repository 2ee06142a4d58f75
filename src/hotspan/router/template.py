"""A model's chat template: from messages to the text that the engine computes.

It is rendered as by `transformers` and the engine: content that is a list of texts stays a list for templates that
iterate over lists, and is joined by newlines for others, without its empty texts; the arguments of tool calls are
parsed, and the fields of calls are in the engine's order.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError, UnsupportedModelError

Json = dict[str, Any]

_MARK = "\ue000hotspan\ue001"
"""Marks where a text is cut; of private characters, which no template changes."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = "\ue000probe\ue001"


class ChatTemplate:
    """A compiled template.

    specials: tokens that it may name, such as bos_token. with_tools: the template for requests with tools.
    """

    def __init__(
        self, source: str, specials: Mapping[str, str], *, with_tools: str | None = None, clock: Clock | None = None
    ) -> None:
        """Raises: UnsupportedModelError for a template that does not compile here."""
        environment = _environment(clock or SystemClock())
        self._specials = dict(specials)
        try:
            self._template = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools) if with_tools else self._template
        except TemplateError as error:
            raise UnsupportedModelError(
                f"the chat template does not compile ({error}): correct the model's template"
            ) from error
        self._takes_text = _PROBE in self._probe(_PROBE)
        shown = self._probe([{"type": "text", "text": _PROBE}])
        self._takes_lists = _PROBE in shown and "'type'" not in shown and '"type"' not in shown
        self.overhead = len(self._probe("").encode(errors="replace"))

    @classmethod
    def load(cls, directory: Path, clock: Clock | None = None) -> "ChatTemplate | None":
        """The template in a model's directory; None without one. Raises: ConfigError."""
        config = _read(directory / "tokenizer_config.json")
        found = config.get("chat_template")
        named = {each["name"]: each["template"] for each in found} if isinstance(found, list) else {"default": found}
        own = directory / "chat_template.jinja"
        if own.exists():
            named["default"] = own.read_text(encoding="utf-8")
        source = named.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, _specials(config), with_tools=named.get("tool_use"), clock=clock)

    def render(self, messages: Sequence[Json], body: Mapping[str, Any]) -> str | None:
        """The prompt of a chat, up to its first image; None if the template refuses it.

        body: of the request, for its tools, documents and template's own settings.
        """
        tools, documents, given = body.get("tools"), body.get("documents"), body.get("chat_template_kwargs")
        options: Json = {"add_generation_prompt": body.get("add_generation_prompt", True) is not False}
        if isinstance(body.get("reasoning_effort"), str):
            effort = body["reasoning_effort"]
            options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if isinstance(given, Mapping):
            options |= {
                name: value for name, value in given.items() if name not in ("messages", "tools", "chat_template")
            }
        shown, is_cut = self._prepared(messages, is_continued=body.get("continue_final_message") is True)
        options["add_generation_prompt"] = options["add_generation_prompt"] and not is_cut
        template = self._with_tools if tools else self._template
        text = self._rendered(
            template,
            messages=shown,
            tools=[_tool(tool) for tool in tools] if isinstance(tools, list) and tools else None,
            documents=documents if isinstance(documents, list) else None,
            **options,
        )
        if text is None or not is_cut:
            return text
        at = text.rfind(_MARK)
        return text[:at] if at >= 0 else None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _probe(self, content: object) -> str:
        return self._rendered(self._template, messages=[{"role": "user", "content": content}], tools=None) or ""

    def _rendered(self, template: Any, **names: Any) -> str | None:
        try:
            return str(template.render(**{**self._specials, **names}))
        except Exception:  # a template is a program, and may do anything with an odd request
            return None

    def _prepared(self, messages: Sequence[Json], *, is_continued: bool) -> tuple[list[Json], bool]:
        """The messages as templates expect them, up to the first image, and whether the text ends at a mark."""
        shown: list[Json] = []
        for message in messages:
            texts, is_whole = texts_of(message.get("content"))
            if not is_whole and not self._takes_lists:
                texts = []  # the engine puts images first
            is_last = not is_whole or (is_continued and message is messages[-1])
            if is_last:
                texts = [*texts[:-1], texts[-1] + _MARK] if texts else [_MARK]
            prepared = dict(message)
            prepared["content"] = self._content(message.get("content"), texts)
            if isinstance(prepared.get("tool_calls"), list):
                prepared["tool_calls"] = [_call(call) for call in prepared["tool_calls"]]
            shown.append(prepared)
            if is_last:
                return shown, True
        return shown, False

    def _content(self, content: object, texts: Sequence[str]) -> object:
        is_list = self._takes_lists if isinstance(content, list) else not self._takes_text and self._takes_lists
        return [{"type": "text", "text": text} for text in texts] if is_list else "\n".join(filter(None, texts))


def texts_of(content: object) -> tuple[list[str], bool]:
    """The texts of a message's content before anything that is not text, and whether that is all of it."""
    if content is None:
        return [], True
    if isinstance(content, str):
        return [content], True
    if not isinstance(content, list):
        return [], False
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            return texts, False
        texts.append(text)
    return texts, True


def _tool(tool: object) -> object:
    """A tool as the engine writes it: its fields in order, omitted ones null."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        return tool
    given = tool["function"]
    function: Json = {name: given.get(name) for name in ("name", "description", "parameters")}
    function |= {name: given[name] for name in ("strict", "defer_loading") if given.get(name) is not None}
    return {"type": tool.get("type", "function"), "function": function}


def _call(call: object) -> object:
    """A tool call with its arguments parsed and its fields in the engine's order: some templates write it as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(call, Mapping)
        or not isinstance(function, Mapping)
        or not isinstance(function.get("arguments"), str)
    ):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    function = {"arguments": arguments, **{name: value for name, value in function.items() if name != "arguments"}}
    shown = {**call, "function": function}
    return {name: shown[name] for name in dict.fromkeys(("id", "function", "type", *shown)) if name in shown}


def _specials(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer's settings name."""
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _read(path: Path) -> Json:
    if not path.exists():
        return {}
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read ({error}): give a model's directory") from error
    return read if isinstance(read, dict) else {}


class _Generation(Extension):
    """{% generation %}, which marks answers for training and changes nothing else."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    """What templates are compiled in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime(clock)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime(clock: Clock) -> Callable[[str], str]:
    return lambda form: datetime.fromtimestamp(clock.unix()).strftime(form)
