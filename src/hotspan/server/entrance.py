"""Where a server listens, and who may do what there."""

import contextlib
import logging
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hotspan.config.admin_token import VARIABLE, admin_token
from hotspan.http.hosts import Hosts
from hotspan.http.options import allowed
from hotspan.http.serving import bind
from hotspan.server.options import ServeOptions, bind_admin, check_exposure
from hotspan.server.policy import Access, App, Gate, access_table, unlisted
from hotspan.server.principal import Credentials, Link

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entrance:
    """An open one.

    listeners: the clients' socket, then the administrator's. hosts: as `Gate` has it.
    """

    listeners: list[socket.socket]
    credentials: Credentials
    access: Mapping[str, Access]
    admin_port: int | None
    hosts: Hosts | None

    def gate(self, app: App) -> Gate:
        """The app behind it."""
        for path in unlisted(app.routes, self.access):
            logger.warning("route_without_policy path=%s: only the administrator reaches it", path)
        return Gate(app, self.access, self.credentials, self.admin_port, self.hosts)


@contextlib.contextmanager
def open_entrance(
    options: ServeOptions, surroundings: Mapping[str, str], link: Link | None = None
) -> Iterator[Entrance]:
    """The entrance of a server with these options; with `link`, of one that only the front of its store may use.

    Raises: ConfigError if an address can't be had, other machines could use it without a key, or there is nowhere to
            leave the admin token.
    """
    server = options.server
    with contextlib.ExitStack() as stack:
        bound = bind(server.host, server.port) if link is None else link.bind()
        listeners = [stack.enter_context(contextlib.closing(bound))]
        if (admin := bind_admin(options, bound)) is not None:
            listeners.append(stack.enter_context(contextlib.closing(admin)))
        if link is None:
            check_exposure(bound, options)
            # Commands of this user look for the token by the port that they are to administer.
            port = listeners[-1].getsockname()[1]
            token = stack.enter_context(admin_token(port, server.admin_token_file, surroundings))
        access = access_table(
            has_keys=options.has_keys,
            has_given_token=server.admin_token_file is not None or bool(surroundings.get(VARIABLE)),
            has_client_adapters=server.client_adapters is not None,
        )
        credentials = Credentials(options.tenants, token) if link is None else link.credentials
        is_open = link is None and not options.has_keys
        pages = allowed(options.engine_values, "origins")
        hosts = Hosts((server.host, *server.allowed_hosts), pages) if is_open else None
        yield Entrance(listeners, credentials, access, server.admin_port, hosts)
