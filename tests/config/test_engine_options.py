"""Options of the engine: what they are as words, and whose they are when the engine refuses them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.engine_options import check_options, split_words, words_of
from hotspan.config.origin import Given, Source
from hotspan.core.errors import ConfigError

DEFAULTS = {
    "dtype": "auto",
    "needs_length": False,
    "max_model_len": None,
    "enable_log_requests": False,
    "enable_prefix_caching": None,
}


def option(name: str, value: Any, place: str = "file:3") -> Given:
    return Given(name, value, Source.SERVING_PROPERTIES, f"option.{name}", place, value)


def parse(words: Sequence[str]) -> None:
    """An engine's parser that knows one dtype, and one contradiction."""
    words = list(words)
    if "--dtype" in words and words[words.index("--dtype") + 1] != "half":
        raise ConfigError("an engine option is wrong: dtype")
    if "--dtype" in words and "--max-model-len" in words:
        raise ConfigError("the engine's options contradict each other")
    if "--needs-length" in words and "--max-model-len" not in words:
        raise ConfigError("--needs-length requires --max-model-len")
    if "--bad" in words:
        raise ConfigError("unknown option --bad")


@given(st.lists(st.text("-ab=1 ", min_size=1, max_size=5), max_size=8))
def test_splitting_loses_nothing(words: list[str]) -> None:
    """Whatever the words are, together they are what they were."""
    assert [word for option in split_words(words) for word in option.words] == words


def test_names_of_words() -> None:
    """Short names, dashes, `no-`, dots and `=` all name vLLM's option."""
    words = ["-tp", "2", "--max-model-len=5", "--no-enable-lora", "--compilation-config.level", "3", "--a_b", "x", "y"]
    assert [(one.name, one.value) for one in split_words(words)] == [
        *(("tensor_parallel_size", "2"), ("max_model_len", "5"), ("enable_lora", False)),
        *(("compilation_config", "3"), ("a_b", ["x", "y"])),
    ]


def test_off_is_no_option_where_it_only_can_be_on() -> None:
    """false for a switch that is off anyway is left out; for one that may be either, it is said."""
    options = [option("enable_log_requests", False), option("enable_prefix_caching", False)]
    checked = check_options(options, (), DEFAULTS, parse)
    assert [word for one in checked for word in words_of(one)] == ["--no-enable-prefix-caching"]


def test_the_culprit_is_named() -> None:
    """An option that the engine refuses is named with its key, value and place; an unknown one with what was meant."""
    with pytest.raises(ConfigError, match=r"file:3: option.dtype = fp17: an engine option is wrong: dtype"):
        check_options([option("max_model_len", 5, "file:1"), option("dtype", "fp17")], (), DEFAULTS, parse)
    with pytest.raises(ConfigError, match=r"file:3: option.max_modle_len = 5.*did you mean option.max_model_len"):
        check_options([option("max_modle_len", "5")], (), DEFAULTS, parse)


def test_what_needs_another_is_no_culprit() -> None:
    """An option that can't stand alone is not blamed for what another one has wrong."""
    given = [option("needs_length", True, "file:1"), option("max_model_len", 5, "file:2")]
    assert check_options(given, (), DEFAULTS, parse)
    with pytest.raises(ConfigError, match=r"^file:3: option.dtype = fp17: an engine option is wrong: dtype$"):
        check_options([*given, option("dtype", "fp17")], (), DEFAULTS, parse)


def test_contradictions_name_all() -> None:
    """Where each option is right alone, all that files gave are named; what the command line has wrong stays."""
    with pytest.raises(ConfigError, match=r"contradict.*come from: file:3: option.dtype = half"):
        check_options([option("dtype", "half")], ["--max-model-len", "5"], DEFAULTS, parse)
    with pytest.raises(ConfigError, match=r"^unknown option --bad$"):
        check_options([option("dtype", "half")], ["--bad"], DEFAULTS, parse)
