"""How far a replica has done what the shared log says, beside its disk tier: a file of a few bytes."""

import json
import logging
import os
from pathlib import Path

from hotspan.tiers.follower import LogPosition

logger = logging.getLogger(__name__)

POSITION_FILE = "l2-log"


def read_position(directory: Path) -> LogPosition | None:
    """What `write_position` wrote last; None if that can't be told: then nothing in the directory can be trusted."""
    try:
        said = json.loads((directory / POSITION_FILE).read_bytes())
        return LogPosition(bytes.fromhex(said["epoch"]), int(said["generation"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_position(directory: Path, position: LogPosition) -> bool:
    """Whole or not at all. False if the disk does not take it: the next start will do more than it needs to."""
    fresh = directory / (POSITION_FILE + ".new")
    try:
        with fresh.open("w") as file:
            json.dump({"epoch": position.epoch.hex(), "generation": position.generation}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(directory / POSITION_FILE)
    except OSError as error:
        logger.warning("l2_position_not_written path=%s error=%s", directory, str(error))
        return False
    return True
