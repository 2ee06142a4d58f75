"""A conversation with a SageMaker endpoint that stays at one instance, by SageMaker's stateful sessions.

python client.py ENDPOINT [ENDPOINT_URL]      needs: boto3 and AWS credentials
"""

import json
import sys
from typing import Any

import boto3

ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else "llama"
URL = sys.argv[2] if len(sys.argv) > 2 else None

runtime = boto3.client("sagemaker-runtime", endpoint_url=URL)


def invoke(body: dict[str, Any], **more: str) -> dict[str, Any]:
    return runtime.invoke_endpoint(EndpointName=ENDPOINT, ContentType="application/json", Body=json.dumps(body), **more)


def main() -> None:
    opened = invoke({"requestType": "NEW_SESSION"}, SessionId="NEW_SESSION")
    session = opened["NewSessionId"].split(";")[0]
    print("session", session)
    contract = "The supplier delivers within ten days. " * 80
    for question in ("Summarize the contract.", "Who may end it?"):
        body = {"prompt": f"{contract}\n{question}\n", "max_tokens": 16}
        answer = json.load(invoke(body, SessionId=session)["Body"])
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        print(f"{answer['usage']['prompt_tokens']} tokens in the prompt, {cached} from the cache")
    closed = invoke({"requestType": "CLOSE"}, SessionId=session)
    print("closed", closed["ClosedSessionId"])


if __name__ == "__main__":
    main()
