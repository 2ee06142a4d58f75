"""docs/formatters.md: its examples are run."""

import re
from pathlib import Path

import pytest

from hotspan.core.errors import FormatterError
from hotspan.formatters import load_formatters
from tests.formatters.conftest import Write

DOCS = (Path(__file__).parents[2] / "docs" / "formatters.md").read_text()


def example(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)
    return str(block)


async def test_yaml_example(write: Write) -> None:
    """The YAML example loads and does what the tables under it say."""
    formatters = load_formatters(write(yaml=example("yaml")), {}, is_secure=True)
    result = await formatters.input(None, {"inputs": "why?", "topic": "Rain"}, {})
    assert result["inputs"] == "Answer in one sentence. Rain: why?\n"
    assert result["parameters"] == {"max_new_tokens": 64}
    answer = await formatters.output(None, {"generated_text": 'so "it" is'}, {"x-request-id": "r"})
    assert answer == {"answer": 'so "it" is', "metadata": {"request": "r", "model": "support, July"}}
    with pytest.raises(FormatterError, match="is greater than the maximum of 500"):
        await formatters.input(None, {"inputs": "", "topic": "", "parameters": {"max_new_tokens": 501}}, {})


async def test_python_example(write: Write) -> None:
    """The Python example loads, changes requests and answers, and refuses what it says it refuses."""
    formatters = load_formatters(write(model=example("python")), {}, is_secure=False)
    assert await formatters.input(None, {"inputs": "why?", "topic": "rain"}, {}) == {"inputs": "About rain: why?"}
    assert await formatters.output(None, {"generated_text": "x"}) == {"generated_text": "x", "served_by": "support"}
    with pytest.raises(FormatterError, match="topic is missing") as refused:
        await formatters.input(None, {"inputs": "why?"}, {})
    assert refused.value.status == 400
