"""Media parts are known by their content and their tenant, whatever identity a client gives them.

vLLM takes the `uuid` of a media part as the part's identity. The processor cache, the encoder cache, the prefix cache
and the names of chunks go by that identity, so that a client who names another's `uuid` gets the other's image, and
one who sends other content under a known `uuid` poisons it. Where nothing else needs an identity
(`--mm-processor-cache-gb 0 --no-enable-prefix-caching`), vLLM numbers the parts anew in each process, and a tier that
outlives the process would confuse them. Here every part's identity is

    sha256( tenant's salt | vLLM's hash of the model's name, the content and the options that it is processed with )

All routes render their prompts with one renderer, before any cache is asked. A `uuid` beside content is not used; a
`uuid` without content is refused.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers import BaseRenderer

_SALT: ContextVar[str | None] = ContextVar("hotspan_media_salt", default=None)
_content_hashes = ProcessorInputs.get_mm_hashes


def bind_media(renderer: BaseRenderer, salt: Callable[[], str]) -> None:
    """Let `renderer` name media parts by their content and by `salt()`, as the request's task knows it.

    Mutates: `renderer`, before its first prompt.
    """
    ProcessorInputs.get_mm_hashes = _identities
    process = renderer._process_multimodal
    parameters = inspect.signature(process)
    executor = getattr(renderer, "_mm_executor", None) or renderer._executor  # one for both before 0.29

    def bound(own: str, *rest: Any, **options: Any) -> Any:
        call = parameters.bind(*rest, **options)
        _check_content(call.arguments["mm_data"])
        call.arguments["mm_uuids"] = None
        with _salted(own):
            return process(*call.args, **call.kwargs)

    @wraps(process)
    def processed(*rest: Any, **options: Any) -> Any:
        return bound(salt(), *rest, **options)

    async def processed_async(*rest: Any, **options: Any) -> Any:
        # Asked for here: the executor's threads don't know whose request it is.
        call = partial(bound, salt(), *rest, **options)
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    renderer._process_multimodal = processed
    renderer._process_multimodal_async = processed_async


@wraps(_content_hashes)
def _identities(inputs: ProcessorInputs, *rest: Any, **options: Any) -> Any:
    """The parts' identities by modality; vLLM's own outside of a renderer that `bind_media` has seen."""
    salt = _SALT.get()
    if salt is None:
        return _content_hashes(inputs, *rest, **options)
    hashes = _content_hashes(replace(inputs, mm_uuid_items=None), *rest, **options)
    return {modality: [_identity(salt, content) for content in contents] for modality, contents in hashes.items()}


def _identity(salt: str, content: str) -> str:
    parts = [part.encode() for part in (salt, content)]
    data = b"hotspan-media-1" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _salted(salt: str) -> Iterator[None]:
    token = _SALT.set(salt)
    try:
        yield
    finally:
        _SALT.reset(token)


def _check_content(media: Mapping[str, Any]) -> None:
    """Raise VLLMValidationError if a part has no content, which vLLM would take from whoever used its `uuid` before."""
    for modality, parts in media.items():
        if any(part is None for part in (parts if isinstance(parts, list) else [parts])):
            raise VLLMValidationError(
                f"a media part ({modality}) has no content: send its content with every request (a part is known by "
                "its content here; its uuid is not used)",
                parameter="uuid",
            )
