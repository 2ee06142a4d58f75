"""What a body that trips up a check of vLLM's is answered."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, model_validator

from hotspan.engine.guard import refuse_bodies


class Asked(BaseModel):
    options: dict[str, int] | None = None
    fails: bool = False

    @model_validator(mode="before")
    @classmethod
    def check(cls, data: dict[str, object]) -> dict[str, object]:
        options = data.get("options") or {}
        options.get("one")  # type: ignore[attr-defined]
        return data


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    @app.post("/ask")
    def ask(asked: Asked) -> str:
        if asked.fails:
            raise AttributeError("a defect")
        return "answered"

    refuse_bodies(app)
    return TestClient(app, raise_server_exceptions=False)


def test_a_value_of_another_type_is_the_clients_mistake(client: TestClient) -> None:
    """A check that fails on it is a 400 with the cause; a good body is answered."""
    reply = client.post("/ask", json={"options": 7})
    assert reply.status_code == 400 and "can't be read" in reply.json()["error"]["message"]
    assert client.post("/ask", json={"options": {"one": 1}}).status_code == 200


def test_the_servers_own_defects_stay_its_own(client: TestClient) -> None:
    """The same kind of error from a route is a 500."""
    assert client.post("/ask", json={"fails": True}).status_code == 500
