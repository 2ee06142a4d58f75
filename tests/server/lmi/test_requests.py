"""Whatever a client sends is an answer or an error that names the client's mistake, and never one of ours."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from hotspan.http.errors import HttpError, error_type
from hotspan.http.sse import event, events
from hotspan.server.exchange import lmi_status
from hotspan.server.lmi.request import (
    OWN,
    RENAMED,
    SAME,
    TOP_LEVEL,
    chosen_schema,
    session_request,
    take_adapter,
)
from hotspan.server.lmi.schema import Generation, embeddings_body

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from((*RENAMED, *OWN, *SAME)) | st.text(max_size=8)
fields = st.sampled_from(("inputs", "stream", "model", "adapters", "requestType", *TOP_LEVEL)) | st.text(max_size=8)
payloads = st.builds(
    lambda payload, parameters: {"inputs": "Say", **payload, "parameters": parameters},
    st.dictionaries(fields, json_values, max_size=3),
    st.dictionaries(names, json_values, max_size=4) | json_values,
)


@given(payloads)
def test_any_payload(payload: dict[str, Any]) -> None:
    """Any JSON is a request or an error of the client's (4xx), whichever part of it is looked at."""
    for look in (
        lambda: Generation.parse(payload),
        lambda: embeddings_body(payload),
        lambda: session_request(payload),
        lambda: chosen_schema(payload, is_embedding=True),
        lambda: take_adapter(dict(payload), Headers({}), ("lmi",)),
    ):
        try:
            look()
        except HttpError as refused:
            assert 400 <= refused.status < 500, refused


@given(st.integers(400, 599).filter(lambda status: status in {400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504}))
def test_statuses_of_lmi(status: int) -> None:
    """LMI's front end has true statuses of its own; what the model's side refuses is 424, a full queue 503."""
    kept = {401: 401, 403: 403, 408: 408, 413: 413, 429: 503, 503: 503, 504: 504}
    assert lmi_status(status) == kept.get(status, 424)
    assert error_type(status).endswith("Error") and not error_type(status).endswith("ErrorError")


@given(st.lists(json_values, max_size=5), st.integers(1, 7))
async def test_events_however_they_are_cut(values: list[Any], size: int) -> None:
    """A stream's events are the same however its bytes arrive; comments and the end are not among them."""
    import json

    told = [{"value": value} for value in values if json.dumps(value) == json.dumps(json.loads(json.dumps(value)))]
    stream = b": keep-alive\n\n" + b"".join(event(json.dumps(one).encode()) for one in told) + event(b"[DONE]")

    async def parts() -> Any:
        for at in range(0, len(stream), size):
            yield stream[at : at + size]

    assert json.dumps([one async for one in events(parts())]) == json.dumps(told)
