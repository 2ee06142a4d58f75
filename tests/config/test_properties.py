"""Java's properties files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.properties import parse_properties, read_properties
from hotspan.core.errors import ConfigError

PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def escaped(text: str, *, is_name: bool) -> str:
    """As Java's Properties.store writes it."""
    out = []
    for at, letter in enumerate(text):
        if letter in "\t\n\r\f":
            out.append("\\" + {"\t": "t", "\n": "n", "\r": "r", "\f": "f"}[letter])
        elif letter in "\\=:#!" or (letter == " " and (is_name or at == 0)):
            out.append("\\" + letter)
        elif not " " <= letter <= "~":
            units = letter.encode("utf-16-be")
            out += [f"\\u{units[n : n + 2].hex()}" for n in range(0, len(units), 2)]
        else:
            out.append(letter)
    return "".join(out)


@given(st.dictionaries(PLAIN.filter(bool), PLAIN), st.sampled_from(["=", ":", " = ", "\t:  "]), st.sampled_from("\n\r"))
def test_what_java_writes_is_read_back(entries: dict[str, str], separator: str, end: str) -> None:
    """Whatever names and values a file was written with come back, whichever separator and line end it has."""
    lines = [escaped(name, is_name=True) + separator + escaped(text, is_name=False) for name, text in entries.items()]
    read = parse_properties(end.join(["# a comment", "", *lines]), "file")
    assert {entry.name: entry.value for entry in read} == entries


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text crashes the reader: it gives entries, or an error that names the line."""
    try:
        entries = parse_properties(text, "file")
    except ConfigError as error:
        assert "file:" in str(error)
    else:
        assert all(int(entry.place.removeprefix("file:")) >= 1 for entry in entries)


def test_lines_go_on() -> None:
    """A backslash joins lines without the blanks that begin the next; an even number of them ends a value."""
    text = 'a = one, \\\n    two\n! comment \\\nb:3\\\\\nc\nd 4\n\n  e={"x": 1}\\'
    read = [(entry.name, entry.value, entry.place) for entry in parse_properties(text, "f")]
    assert read == [
        *(("a", "one, two", "f:1"), ("b", "3\\", "f:4"), ("c", "", "f:5")),
        *(("d", "4", "f:6"), ("e", '{"x": 1}', "f:8")),
    ]


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """A broken escape names its line; what can't be read, or is no text, names the file."""
    path = tmp_path / "serving.properties"
    path.write_text("a=1\nb=\\u12g4")
    with pytest.raises(ConfigError, match=r"serving.properties:2: .*hexadecimal"):
        read_properties(path)
    path.write_bytes(b"a=\xff")
    with pytest.raises(ConfigError, match="no UTF-8"):
        read_properties(path)
    with pytest.raises(ConfigError, match=r"nothing.* can't be read"):
        read_properties(tmp_path / "nothing")
    path.write_bytes(b"\xef\xbb\xbfa=\xc3\xa9")
    assert [(entry.name, entry.value) for entry in read_properties(path)] == [("a", "é")]
