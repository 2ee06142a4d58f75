"""Two tenants: neither hits nor invalidates what the other one sent.

python tenants.py [SERVER]      needs: requests; a server with --tenants tenants.yaml
"""

import sys

import requests

SERVER = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
http = requests.Session()
http.trust_env = False  # a proxy in the environment does not reach this machine's addresses
ACME, GLOBEX = "sk-acme-0123456789abcdef0123", "sk-globex-0123456789abcdef01"
TEXT = "The same contract, sent by both. " * 100


def post(path: str, key: str, body: dict[str, object]) -> requests.Response:
    return http.post(f"{SERVER}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=300)


def cached(key: str) -> int:
    """How many tokens of the text the tenant did not have to compute."""
    models = http.get(f"{SERVER}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=30).json()
    body = {
        "model": models["data"][0]["id"],
        "prompt": TEXT,
        "max_tokens": 1,
        "kv_transfer_params": {"tags": ["contract"]},
    }
    answer = post("/v1/completions", key, body)
    answer.raise_for_status()
    return (answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def main() -> None:
    print("without a key:             status", post("/v1/completions", "none", {}).status_code)
    print("acme, first:              ", cached(ACME), "tokens from the cache")
    print("acme, again:              ", cached(ACME), "tokens from the cache")
    print("globex, the same text:    ", cached(GLOBEX), "tokens from the cache")
    receipt = post("/hotspan/cache/invalidate", GLOBEX, {"tags": ["contract"]}).json()
    print("globex invalidates its own:", receipt["removed"])
    print("acme still has its own:   ", cached(ACME), "tokens from the cache")


if __name__ == "__main__":
    main()
