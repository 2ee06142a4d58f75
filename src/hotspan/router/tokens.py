"""The bytes of each token of a model, and the bytes of the tokens of a text.

KV events have tokens and requests have text: both are compared as the bytes of tokens. These differ from the text in a
few places, which are learnt from the tokenizer's output for sample texts: what it puts in front (a BOS, a space), white
space that special tokens remove, Unicode normal forms, a mark that is the same as a space. A tokenizer that changes
text in another way (lower case, unknown words) is refused.
"""

import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hotspan.core.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE = "x y"
_SPACES = re.compile(r"\s*")

MAX_ADDED = 1 << 15
"""Added tokens of a text that is compared: several for each message."""

MAX_NOT_ASCII = 1 << 17
"""Characters of a text, besides those of ASCII, that are normalised; a text is compared up to there."""

_NOT_ASCII = re.compile(rf"[^\x00-\x7f][^\x00-\x7f]{{,{MAX_NOT_ASCII - 1}}}")

MAX_MARKS = 32
"""Combining marks in a row that are normalised, as in Unicode's Stream-Safe Text Format (UAX 15): to put a run of marks
into its order takes a time that is quadratic in the run. A text is compared up to a longer run."""

_NO_LETTERS = re.compile(rf"[\W\uff9e\uff9f]{{{MAX_MARKS + 1},}}")
"""Where a long run of marks can be: they are no letters or digits, but for two. Much faster than to look for marks."""


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a text becomes the bytes of its tokens.

    lead:   goes in front of a stretch between special tokens: of the first one, if the text begins with it, or of
            each (`is_everywhere`); also of one that begins with it already (`is_doubled`).
    form:   the Unicode normal form that text is brought to.
    is_one: spaces and the mark that stands for them in tokens (U+2581) can't be told apart in tokens.
    """

    lead: str = ""
    is_everywhere: bool = False
    is_doubled: bool = False
    form: Literal["", "NFC", "NFKC"] = ""
    is_one: bool = False

    def marked(self, text: str) -> str:
        """The text with spaces for the mark, if it stands for them in texts too."""
        return text.replace(_SPACE, " ") if self.is_one else text


class AddedToken(NamedTuple):
    """A token that is found in a text before the text is split; it may remove the white space beside it."""

    content: str
    takes_left: bool = False
    takes_right: bool = False


class AddedTokens:
    """Finds added tokens in a text: at each place the longest. Linear in the text, however many there are.

    What is behind MAX_ADDED of them is left out.
    """

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._by_content = {token.content: token for token in tokens}
        self._pattern = re.compile(_longest(self._by_content))

    def stretches(self, text: str) -> Iterator[tuple[str, str]]:
        """The text before each added token, without the white space that is removed, and that token; "" at the end."""
        at = 0
        for number, found in enumerate(self._pattern.finditer(text) if self._by_content else ()):
            if number == MAX_ADDED:
                return
            token = self._by_content[found[0]]
            if found.start() < at:  # the token before took this white space
                continue
            before = text[at : found.start()]
            yield before.rstrip() if token.takes_left else before, token.content
            at = _SPACES.match(text, found.end()).end() if token.takes_right else found.end()  # type: ignore[union-attr]
        yield text[at:], ""


def _longest(contents: Iterable[str]) -> str:
    """A pattern of the longest of some texts that is at a place: a tree of their characters."""
    tree: dict[str, Any] = {}
    for content in contents:
        node = tree
        for character in content:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: Mapping[str, Any]) -> str:
        ways = [re.escape(character) + pattern(inner) for character, inner in node.items() if character]
        if not ways:
            return ""
        joined = ways[0] if len(ways) == 1 and "" not in node else f"(?:{'|'.join(ways)})"
        return joined + "?" if "" in node else joined

    return pattern(tree)


class TokenTable:
    """The bytes of tokens by ID. About 60 bytes per token; made once per model, in about a second."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Raises: UnsupportedModelError if the text can't be recovered from its tokens."""
        described = json.loads(tokenizer.to_str())
        self._bytes = _table(tokenizer, described)
        self._added = [
            AddedToken(token["content"], token["lstrip"], token["rstrip"])
            for token in described.get("added_tokens") or ()
            if token["content"]
        ]
        self._finder = AddedTokens(self._added)
        self._strips = any(token.takes_left or token.takes_right for token in self._added)
        specials = [token["content"] for token in described.get("added_tokens") or () if token["special"]]
        self._spelling = self._learn(tokenizer, specials)
        self.lead = self._put_in_front(tokenizer)

    @classmethod
    def load(cls, directory: Path) -> "TokenTable":
        """The table of a model's directory. Raises: ConfigError, UnsupportedModelError."""
        return cls(read_tokenizer(directory))

    def __len__(self) -> int:
        return len(self._bytes)

    def join(self, ids: Sequence[int]) -> bytes | None:
        """The bytes of tokens; None if a token is unknown or has no definite bytes. IDs are >= 0."""
        table = self._bytes
        try:
            return b"".join([table[each] for each in ids])  # type: ignore[misc]
        except (IndexError, TypeError):
            return None

    def spell(self, text: str, *, is_whole: bool) -> bytes:
        """The bytes of the tokens of a text. is_whole: with what the tokenizer puts in front of a prompt (BOS)."""
        how = self._spelling
        if how.form and not text.isascii():
            text = normal_form(text, how.form)
        if how.lead or self._strips:
            text = self._stretched(text)
        spelt = how.marked(text).encode(errors="replace")
        return self.lead + spelt if is_whole else spelt

    # -- inside ----------------------------------------------------------------------------------------------------

    def _stretched(self, text: str, how: _Spelling | None = None) -> str:
        """The text with what is put in front of its stretches, and without the white space that added tokens remove."""
        how, out = how or self._spelling, list[str]()
        for stretch, token in self._finder.stretches(text):
            out += (_led(stretch, how, is_first=not out), token)
        return "".join(out)

    def _learn(self, tokenizer: "Tokenizer", specials: Sequence[str]) -> _Spelling:
        """The spelling that agrees with the tokenizer on all samples. Raises: UnsupportedModelError if none does."""
        samples = [*_samples(specials)]
        spelt = [(text, self.join(tokenizer.encode(text, add_special_tokens=False).ids)) for text in samples]
        known = [(text, data) for text, data in spelt if data is not None]
        if not any(_PROBE in text for text, _ in known):
            raise UnsupportedModelError(
                "the tokenizer does not know common characters: KV events can't be compared with text"
            )
        either = (False, True)
        ways = product(either, ("", " "), either, either, ("", "NFC", "NFKC"))
        for is_one, lead, everywhere, doubled, form in ways:
            how = _Spelling(lead, everywhere, doubled, form, is_one)  # type: ignore[arg-type]
            if all(self._spelt(text, how) == data for text, data in known):
                return how
        raise UnsupportedModelError(
            "the tokenizer changes text in a way that can't be followed: leave events out for these replicas; prompts "
            "are then compared with what was sent before"
        )

    def _spelt(self, text: str, how: _Spelling) -> bytes:
        normal = unicodedata.normalize(how.form, text) if how.form else text
        return how.marked(self._stretched(normal, how)).encode()

    def _put_in_front(self, tokenizer: "Tokenizer") -> bytes:
        """The bytes that the tokenizer puts in front of each prompt."""
        bare = self.join(tokenizer.encode(_PROBE, add_special_tokens=False).ids)
        whole = self.join(tokenizer.encode(_PROBE).ids)
        if bare is None or whole is None or bare not in whole:
            raise UnsupportedModelError("the tokenizer puts something into prompts that has no text: leave events out")
        return whole[: whole.index(bare)]


def read_tokenizer(directory: Path) -> "Tokenizer":
    """The tokenizer of a model's directory. Raises: ConfigError."""
    from tokenizers import Tokenizer  # of an extra: who names no model needs none

    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{path} can't be read ({error}): give a model with a tokenizer.json") from error


def _samples(specials: Sequence[str]) -> Iterator[str]:
    """Texts that show how a tokenizer changes text."""
    yield from (
        _PROBE,
        f" {_PROBE}",
        "x  y",
        "x\n\ny\t z ",
        "Word WORD",
        "caf\u00e9",
        "cafe\u0301",
        "\ufb01x",
        "\U0001f389 \u6f22",
        f"x{_SPACE}y",
    )
    for special in specials[:8]:
        yield from (special + _PROBE, f"{special} {_PROBE}", f"x {special}\n{_PROBE}", special + special + _PROBE)


def _led(text: str, how: _Spelling, *, is_first: bool) -> str:
    if not text or not how.lead or not (is_first or how.is_everywhere):
        return text
    return text if text.startswith(how.lead) and not how.is_doubled else how.lead + text


def normal_form(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """A text in a normal form, up to a run of more than MAX_MARKS combining marks, or MAX_NOT_ASCII characters."""
    left, out, at = MAX_NOT_ASCII, list[str](), 0
    for found in _NOT_ASCII.finditer(text):
        start = max(found.start() - 1, at)  # its first mark may be composed with the character before
        part = text[start : min(found.end(), start + left)]
        left -= len(part)
        run = _run(part) if len(part) > MAX_MARKS else None
        if run is not None:
            part = part[: max(run - 1, 0)]  # the character before may be composed with the first mark
        out += (text[at:start], unicodedata.normalize(form, part))
        at = found.end()
        if run is not None or not left:
            return "".join(out)
    return "".join((*out, text[at:]))


def _run(text: str) -> int | None:
    """Where the first run of more than MAX_MARKS combining marks begins."""
    runs = _runs()
    found = (runs.search(text, *maybe.span()) for maybe in _NO_LETTERS.finditer(text))
    return next((run.start() for run in found if run is not None), None)


@cache
def _runs() -> re.Pattern[str]:
    """Finds runs of more than MAX_MARKS characters that begin with a combining mark when they are decomposed."""
    marks = [
        character
        for character in map(chr, range(0x300, sys.maxunicode + 1))
        if unicodedata.combining(character)
        or (unicodedata.decomposition(character) and unicodedata.combining(unicodedata.normalize("NFKD", character)[0]))
    ]
    either = f"[{''.join(marks)}]"
    return re.compile(f"{either}{either}{{{MAX_MARKS}}}")  # the first by itself is looked for quickly


def _table(tokenizer: "Tokenizer", described: Mapping[str, Any]) -> list[bytes | None]:
    """The bytes of each token; None for a token without definite bytes."""
    model = described["model"]
    kinds = set(_kinds(described.get("decoder"))) | set(_kinds(described.get("pre_tokenizer")))
    if "ByteLevel" in kinds:
        of_token = _byte_level
    elif model["type"] in ("BPE", "Unigram") and ("Metaspace" in kinds or _replaces_spaces(described)):
        of_token = _pieces_of_text
    else:
        raise UnsupportedModelError(
            f"a tokenizer of type {model['type']} with {', '.join(sorted(kinds)) or 'no decoder'} does not keep the "
            "text: leave events out for these replicas; prompts are then compared with what was sent before"
        )
    unknown = _unknown(model)
    table: list[bytes | None] = []
    for token, number in sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
        table += [None] * (number + 1 - len(table))
        table[number] = None if token == unknown else of_token(token)
    for added in described.get("added_tokens") or ():
        if added["content"] != unknown:
            text = added["content"] if of_token is _byte_level else added["content"].replace(_SPACE, " ")
            table[added["id"]] = text.encode(errors="replace")
    return table


def _unknown(model: Mapping[str, Any]) -> str | None:
    """The token for unknown text."""
    if model["type"] == "Unigram":
        number = model.get("unk_id")
        return None if number is None else str(model["vocab"][number][0])
    return model.get("unk_token")


def _kinds(part: Mapping[str, Any] | None) -> Iterator[str]:
    """The types that a part of a tokenizer is made of."""
    if part:
        yield part["type"]
        for name in ("decoders", "pretokenizers", "normalizers"):
            for inner in part.get(name) or ():
                yield from _kinds(inner)


def _replaces_spaces(described: Mapping[str, Any]) -> bool:
    return f'"content":"{_SPACE}"' in json.dumps(described.get("normalizer"), ensure_ascii=False, separators=(",", ":"))


def _pieces_of_text(token: str) -> bytes:
    """Of a tokenizer of SentencePiece's kind."""
    raw = _BYTE.fullmatch(token)
    return bytes([int(raw[1], 16)]) if raw else token.replace(_SPACE, " ").encode(errors="replace")


def _byte_level(token: str) -> bytes | None:
    """Of a tokenizer whose tokens are bytes, written as one printable character each."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return None


def _printable() -> dict[str, int]:
    """Bytes by the characters that GPT-2 writes them as: Latin-1 where that is printable, else from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(moved)}


_BYTES = _printable()
