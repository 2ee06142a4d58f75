"""RAG with invalidation: documents are computed once, and a changed one is forgotten before it is answered from again.

python rag.py [SERVER]      needs: requests, and HOTSPAN_ADMIN_TOKEN as the server has it (or an API key of a tenant)
"""

import os
import sys
import time

import requests

SERVER = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
http = requests.Session()
http.trust_env = False  # a proxy in the environment does not reach this machine's addresses
MODEL = http.get(f"{SERVER}/v1/models", timeout=30).json()["data"][0]["id"]
SYSTEM = "Answer from the documents. Quote the sentence that supports your answer.\n\n"


def tokens_of(text: str) -> int:
    answer = http.post(f"{SERVER}/tokenize", json={"model": MODEL, "prompt": text}, timeout=30)
    answer.raise_for_status()
    return int(answer.json()["count"])


def ask(question: str, documents: dict[str, str]) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were not computed. documents: text by "id@version"."""
    texts = "\n\n".join(documents[name] for name in sorted(documents))
    body = {
        "model": MODEL,
        "prompt": f"{SYSTEM}{texts}\n\nQuestion: {question}\nAnswer:",
        "max_tokens": 32,
        "temperature": 0,
        "kv_transfer_params": {"tags": sorted(documents), "tags_from": tokens_of(SYSTEM)},
    }
    answer = http.post(f"{SERVER}/v1/completions", json=body, timeout=300)
    answer.raise_for_status()
    said = answer.json()
    cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return said["choices"][0]["text"], cached


def changed(names: list[str]) -> dict[str, object]:
    """What the ingestion pipeline calls after it has written new versions. The receipt: it is durable."""
    batch = [{"tags": [name]} for name in names]
    key = {"authorization": f"Bearer {os.environ['HOTSPAN_ADMIN_TOKEN']}"}
    answer = http.post(f"{SERVER}/hotspan/cache/invalidate", json={"batch": batch}, headers=key, timeout=60)
    answer.raise_for_status()
    receipt: dict[str, object] = answer.json()
    return receipt


def warm(documents: dict[str, str]) -> dict[str, object]:
    """Have documents computed while the server has no requests, and wait until they are."""
    texts = [{"text": text, "tags": [name], "name": name} for name, text in documents.items()]
    body = {"texts": texts, "template": f"{SYSTEM}{{document}}\n\nQuestion: {{question}}\nAnswer:"}
    key = {"authorization": f"Bearer {os.environ['HOTSPAN_ADMIN_TOKEN']}"}
    answer = http.post(f"{SERVER}/hotspan/cache/warm", json=body, headers=key, timeout=60)
    while True:
        answer.raise_for_status()
        warmed: dict[str, object] = answer.json()
        if warmed["state"] not in ("waiting", "running"):
            return warmed
        time.sleep(0.5)
        answer = http.get(f"{SERVER}/hotspan/cache/warm/{warmed['id']}", headers=key, timeout=60)


def main() -> None:
    documents = {
        "manual@1": "The pump is serviced every 500 hours. " * 60,
        "prices@1": "A service costs 120. " * 60,
    }
    print("first question:           ", ask("How often?", documents)[1], "tokens from the cache")
    print("second question:          ", ask("What does it cost?", documents)[1], "tokens from the cache")
    receipt = changed(["manual"])
    print("the manual has changed:   ", receipt["removed"], "receipt", receipt["receipt"])
    print("old text after its change:", ask("How often?", documents)[1], "tokens from the cache")
    documents["manual@2"] = documents.pop("manual@1").replace("500", "250")
    print("new text:                 ", ask("How often?", documents)[1], "tokens from the cache")
    print("new text again:           ", ask("How often?", documents)[1], "tokens from the cache")
    news = {"news@1": "The new pump is serviced every 1,000 hours. " * 60}
    print("warmed:                   ", warm(news)["tokens"], "tokens")
    print("question about the news:  ", ask("How often?", news)[1], "tokens from the cache")


if __name__ == "__main__":
    main()
