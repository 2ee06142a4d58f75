"""The one error of HTTP: what a refusal tells a client besides its message."""

import pytest

from hotspan.http.errors import HttpError


@pytest.mark.parametrize(("status", "after"), [(429, "5"), (503, "5"), (500, None), (400, None)])
def test_who_is_refused_for_now_may_try_again_in_five_seconds(status: int, after: str | None) -> None:
    """Where nothing better is known; where something is, in that time, and after other errors never."""
    assert HttpError(status, "no").headers.get("retry-after") == after
    assert HttpError(status, "no", retry_s=0).headers["retry-after"] == "0"
