"""What stands between a request and its adapter."""

from hotspan.http.errors import HttpError


class AdapterError(HttpError):
    """An adapter can't be had, or not so."""
