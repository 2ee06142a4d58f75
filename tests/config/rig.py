"""A configuration written into files and variables of its own."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hotspan.config.configuration import Configuration, Places, load_configuration
from hotspan.config.own import CommandLine

CONNECTOR = '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'


def configured(
    *words: str,
    model: str | None = "org/name",
    flags: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    serving: str = "",
    server: str = "",
    own: Mapping[str, Any] | str | None = None,
    lmcache: Mapping[str, Any] | str | None = None,
    files: Sequence[str] = (),
    gpus: int = 0,
) -> Configuration:
    """What a container with these files makes of a command line; `words` are the engine's."""
    with tempfile.TemporaryDirectory() as directory:
        places = Places(Path(directory) / "model", Path(directory) / "config.properties")
        given, surroundings = dict(flags or {}), dict(variables or {})
        if lmcache is not None:
            surroundings.setdefault("LMCACHE_CONFIG_FILE", _written(Path(directory) / "lmcache.yaml", lmcache))
        if own is not None:
            given["config"] = _written(Path(directory) / "hotspan.yaml", own)
        for name in files:
            path = places.model / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        if serving:
            places.model.mkdir(exist_ok=True)
            (places.model / "serving.properties").write_text(serving)
        if server:
            places.config_properties.write_text(server)
        return load_configuration(CommandLine(model, given, words), surroundings, places=places, gpus=gpus)


def _written(path: Path, document: Mapping[str, Any] | str) -> str:
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(json.loads(json.dumps(document))))
    return str(path)


def value(configuration: Configuration, key: str) -> Any:
    """What counts for a key."""
    return configuration.settings[key].value
