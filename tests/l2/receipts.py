"""Who has read what a replica invalidated, as a receipt tells it."""

from hotspan.l2.follower import LogFollower


def missing(writer: LogFollower) -> list[str]:
    """Replicas that are alive and have not read the last invalidation that `writer` appended."""
    appended = writer.appended  # first: what is appended meanwhile is another invalidation
    return sorted(name for name, read in writer.readers().items() if read < appended)
