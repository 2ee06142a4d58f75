"""`hotspan serve --headless`: a further host of an engine whose server is on another."""

import contextlib
import dataclasses
import logging

from hotspan.config.environment import environment
from hotspan.core.aftermath import Aftermath, stopping_in_order
from hotspan.core.errors import ConfigError, HotspanError
from hotspan.http.options import check_tls
from hotspan.plan.weights import is_remote
from hotspan.server.hardening import check_draft, check_engine_variables, check_files, hardened
from hotspan.server.options import ServeOptions, check_tiers, fetched
from hotspan.server.run import error_file_for, prepare_environment, show_log

logger = logging.getLogger(__name__)


def run_headless(options: ServeOptions, own_options: tuple[str, ...] = ()) -> None:
    """Run this host's ranks until a signal to stop, or until the host with the server has ended. Nothing listens here.

    Raises: ConfigError or EngineError with what to do.
    """
    show_log()
    surroundings = environment()
    options = hardened(options, surroundings)
    check_tls(options.engine_values)
    check_engine_variables(surroundings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopping_in_order())
        aftermath = stack.enter_context(Aftermath())
        error_file = stack.enter_context(error_file_for(aftermath))
        prepare_environment(error_file.parent, stack)
        if is_remote(options.model):
            options = fetched(options, surroundings)
        check_files(options, surroundings)
        from hotspan.engine.arguments import add_cache, check_hosts, check_replicas, parse_engine_arguments

        arguments = parse_engine_arguments(options.model, options.engine, own_options)
        check_draft(options, arguments, surroundings)
        check_hosts(arguments, options.cache, is_headless=True)
        check_replicas(arguments)
        if options.cache is not None:
            check_tiers(options.cache, surroundings)
            options = dataclasses.replace(options, cache=dataclasses.replace(options.cache, error_file=str(error_file)))
        add_cache(arguments, options.cache)
        from hotspan.engine.ranks import run_ranks

        try:
            run_ranks(arguments, aftermath)
        except HotspanError as error:
            if error_file.exists() and (reason := error_file.read_text()):
                raise ConfigError(reason) from error
            raise
