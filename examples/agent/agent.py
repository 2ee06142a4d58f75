"""An agent's loop: each step's prompt begins with the last one, so only new tokens are computed.

python agent.py [SERVER]      needs: openai
"""

import sys

from openai import OpenAI

SERVER = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
SESSION = "agent-7"
TOOLS = "Tools, always in this order and with this text:\n" + "".join(
    f"- tool_{number}: looks up table {number} and returns its rows as JSON with sorted keys.\n" for number in range(40)
)


def look_up(table: int) -> str:
    """A tool. Its result goes into the prompt once, and is never rewritten."""
    return f'{{"rows": {table * 7}, "table": {table}}}'


def main() -> None:
    client = OpenAI(base_url=f"{SERVER}/v1", api_key="none")
    model = client.models.list().data[0].id
    history = TOOLS + "\nTask: which table is the largest?\n"
    for step in range(4):
        answer = client.completions.create(
            model=model,
            prompt=history,
            max_tokens=16,
            temperature=0,
            extra_headers={"x-session-id": SESSION},
            extra_body={"kv_transfer_params": {"session": SESSION, "ttl": "1h", "renew": True}},
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached = (details.cached_tokens if details else 0) or 0
        print(f"step {step}: {answer.usage.prompt_tokens} tokens in the prompt, {cached} from the cache")
        history += f"{answer.choices[0].text}\nResult of tool_{step}: {look_up(step)}\n"


if __name__ == "__main__":
    main()
