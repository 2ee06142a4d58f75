"""What a prompt has of known windows, and what the index learns from it: one look at each new request.

    first sighting     a window of a section, not known: noted
    second sighting    known but not stored, at whatever offset: worth storing from this prompt
    a tier has it      may be reused. After a restart, or from another replica: found where a section's windows begin

What the prefix caches have is no sighting: a text that always comes with the same text before it needs no window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotspan.engine.blend.index import Found, Named, Owner, WindowIndex
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.windows import Tokens, windows


@dataclass(frozen=True, slots=True)
class Survey:
    """The windows of a prompt, from left to right: those known before, and those noted for the first time.

    known: also such as begin within the exact prefix.
    """

    known: tuple[Found, ...]
    noted: tuple[Found, ...]


def survey(
    index: WindowIndex, owner: Owner, tokens: Tokens, exact_tokens: int, sections: Sequence[Run], named: Named
) -> Survey:
    """Look a prompt up, and note its windows that were never seen. Call once per request: a second call is a sighting.

    exact_tokens: from the front, those that the prefix caches have.
    sections:     as `windows.sections` gives them.
    """
    search = Run(max(0, exact_tokens - index.width + 1), len(tokens))
    found = index.find(owner, tokens, named, search)
    is_known = np.zeros(len(tokens), bool)
    for covered in (Run(0, exact_tokens), *(each.run for each in found)):
        is_known[covered.start : covered.stop] = True
    noted = []
    for section in sections:
        for run in windows(section, index.width):
            if not is_known[run.start : run.stop].any():
                window = tokens[run.start : run.stop]
                noted.append(Found(run, index.note(owner, window, named(window), run.start)))
    return Survey(tuple(found), tuple(noted))
