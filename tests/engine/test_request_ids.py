"""A request id that is used again once its request came to rest: each request has its own text, tags and terms."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness.core import BLOCK, CHUNK, Core, core

pytestmark = pytest.mark.usefixtures("books_agree")

LENGTH = 900
OWN = LENGTH // BLOCK * BLOCK
WHOLE = LENGTH // CHUNK * CHUNK


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    with core(tiny_model, disk=tmp_path_factory.mktemp("ids") / "kv") as engine:
        yield engine


def test_the_next_request_has_its_own_text_and_tags(engine: Core) -> None:
    """Both texts are stored, each goes with its own tag, and nothing of either request is left. (While copies of the
    one before are under way vLLM would mix them up, which is why it gives each request a name of its own.)"""
    first, second = engine.text(1, LENGTH), engine.text(2, LENGTH)
    for text, tag in ((first, "first"), (second, "second")):
        engine.start("same", text, tags=[tag])
        assert engine.finish() == {"same": 0}
        engine.settle()
    engine.forget_gpu()
    assert (engine.ask(first), engine.ask(second)) == (WHOLE, WHOLE)
    engine.administer(do="invalidate", tags=["first"])
    assert (engine.ask(first, no_store=True), engine.ask(second)) == (0, OWN)
    engine.start("same", first, tags=["third"], no_store=True)  # what it may not do binds no other one
    engine.finish()
    engine.settle()
    engine.start("same", first, tags=["fourth"])
    engine.finish()
    engine.administer(do="invalidate", tags=["second"])
    assert (engine.ask(first), engine.ask(second, no_store=True)) == (OWN, 0)
    engine.settle()
    engine.step()
    assert not engine.manager._records and not engine.manager._ended
