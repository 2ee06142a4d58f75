"""`LLM()` as a process that answers JSON lines: python -m tests.shapes.offline '{"options": ..., "forked": ...}'."""

import json
import os
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed
    from vllm import LLM, SamplingParams

    import hotspan

    if settings["forked"] and (child := os.fork()):
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    engine = LLM(**settings["options"])
    print(json.dumps("ready"), file=said, flush=True)
    options = SamplingParams(temperature=0, max_tokens=settings["tokens"], logprobs=1, ignore_eos=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked is None:
            answer: Any = hotspan.control(engine).invalidate(model=True)["removed"]
        elif isinstance(asked, str):
            answer = bool(engine.collective_rpc("reload_weights", kwargs={"weights_path": asked}))
        else:
            (output,) = engine.generate([{"prompt_token_ids": asked}], options, use_tqdm=False)
            first = output.outputs[0]
            chances = [place[token].logprob for token, place in zip(first.token_ids, first.logprobs, strict=True)]
            answer = [first.text, chances, output.num_cached_tokens]
        print(json.dumps(answer), file=said, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
