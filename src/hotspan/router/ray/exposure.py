"""Ray's HAProxy and its replicas listen on all addresses, while each server behind them is told of loopback only."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hotspan.config.engine_options import split_words
from hotspan.config.tenants import load_tenants
from hotspan.core.errors import ConfigError

_TRUE = ("1", "true", "yes", "on")


def checked_words(words: Sequence[str], surroundings: Mapping[str, str]) -> list[str]:
    """The words, with what this environment says of keys: the replicas' nodes have environments of their own.

    words:  the model, and the options of `hotspan serve`. A file of tenants that is not on this machine is not read
            here; each replica does so before it starts.
    Raises: ConfigError unless clients need a key, or the operator has said that they need none.
    """
    given = {option.name: option.value for option in split_words(words) if option.name}
    more = []
    if "tenants" not in given and (file_here := surroundings.get("HOTSPAN_TENANTS", "").strip()):
        more.append(f"--tenants={file_here}")
    if "insecure" not in given and surroundings.get("HOTSPAN_INSECURE", "").strip().lower() in _TRUE:
        more.append("--insecure")
    if given.get("insecure") or "--insecure" in more:
        return [*words, *more]
    named = given.get("tenants") or surroundings.get("HOTSPAN_TENANTS", "").strip()
    if not named:
        raise ConfigError(
            "Ray listens on all addresses, and nobody would need a key: give -- --tenants FILE, or -- --insecure if "
            "the network keeps strangers out"
        )
    file = Path(str(named)).expanduser()
    if file.exists() and not load_tenants(file).has_keys:
        raise ConfigError(
            f"Ray listens on all addresses, and {file} has no API keys, so nobody would need one: give keys in it, or "
            "-- --insecure if the network keeps strangers out"
        )
    return [*words, *more]
