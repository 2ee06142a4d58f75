"""Says when the names of a file change: inotify, by way of the C library."""

import ctypes
import os
from pathlib import Path

_IN_ATTRIB = 0x4  # as <sys/inotify.h> has them; it comes with a change of the number of links
_IN_MOVE_SELF = 0x800
_MAX_EVENTS_BYTES = 4096


class NameWatch:
    """`fd` can be read when a name of the file at `path` was made, removed or renamed.

    Raises: OSError where the kernel gives no watch (fs.inotify.max_user_instances, max_user_watches).
    """

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = _checked(libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            _checked(libc.inotify_add_watch(self.fd, os.fsencode(path), _IN_ATTRIB | _IN_MOVE_SELF))
        except OSError:
            os.close(self.fd)
            raise

    def clear(self) -> None:
        """Forget the events so far."""
        try:
            while os.read(self.fd, _MAX_EVENTS_BYTES):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """End the watch."""
        os.close(self.fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
