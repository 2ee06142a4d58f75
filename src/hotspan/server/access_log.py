"""Which requests uvicorn's access log leaves out."""

import logging


class LeavesOut(logging.Filter):
    """Drops the lines of requests for these paths, as vLLM's --disable-access-log-for-endpoints names them."""

    def __init__(self, paths: str | None) -> None:
        super().__init__()
        self._paths = frozenset(path.strip() for path in (paths or "").split(","))

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        asked = record.args  # client, method, path with query, version, status
        return not (isinstance(asked, tuple) and len(asked) > 2 and str(asked[2]).partition("?")[0] in self._paths)


def leave_out(paths: str | None) -> None:
    """Keep requests for `paths` (separated by commas) out of the access log of this process."""
    if paths:
        logging.getLogger("uvicorn.access").addFilter(LeavesOut(paths))
