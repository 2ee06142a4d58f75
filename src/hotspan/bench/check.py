"""Whether cached answers are the engine's own: questions asked again, alone, and then computed anew on the same server.

    asked   the question as it stands: answered from whatever cache holds its text
    anew    the same with a `cache_salt` that nobody has used: found in no cache, so that the engine computes all of it
    again   the same salt once more: found in the engine's own prefix cache

An answer is the engine's own if it equals one of the last two. Prompts that are computed in pieces of other sizes are
summed in another order, so that at a tie between two tokens `anew` alone may differ from a hit, without a fault.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence

from hotspan.bench.records import AnswerCheck, RequestRecord
from hotspan.bench.workloads.base import Prompt

Ask = Callable[[Prompt, str], Awaitable[RequestRecord]]
"""Send a prompt with a salt ("" is none) and return its answer."""


def chosen(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` of the prompts, spread evenly over them."""
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


async def check_answers(prompts: Sequence[Prompt], ask: Ask) -> AnswerCheck:
    """Ask each question three times, one request at a time.

    All are asked as they stand first: what is computed anew takes room in the caches that they are to come from.
    """
    asked = [await ask(prompt, "") for prompt in prompts]
    same, hits, different, failed, not_anew = 0, 0, [], [], []
    for prompt, found in zip(prompts, asked, strict=True):
        salt = f"hotspan-bench-{secrets.token_hex(16)}"
        anew, again = await ask(prompt, salt), await ask(prompt, salt)
        if not (found.successful and anew.successful and again.successful):
            failed.append(prompt.request_id)
        elif anew.cached_tokens:
            not_anew.append(prompt.request_id)
        elif found.answer in (anew.answer, again.answer):
            same += 1
        else:
            different.append(prompt.request_id)
        hits += bool(found.cached_tokens)
    knows_hits = all(record.cached_tokens is not None for record in asked if record.successful)
    return AnswerCheck(
        same + len(different), same, hits if knows_hits else None, tuple(different), tuple(failed), tuple(not_anew)
    )
