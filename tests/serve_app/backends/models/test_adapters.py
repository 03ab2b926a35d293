from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import client_of
from tests.serve_app.fakes import FakeBackend

CONFIG = {
    "models": [
        {
            "id": "m",
            "source": "x",
            "engine": "vllm",
            "adapters": [{"id": "org/a", "source": "y"}, {"id": "b", "source": "z"}],
        }
    ],
    "auth": {"allow_anonymous": True},
}


async def test_a_request_for_an_adapter_goes_to_its_model_and_names_it() -> None:
    backend = FakeBackend(model_id="m")
    app = build_app(AppParts(AppConfig.model_validate(CONFIG), {"m": backend}))
    async with client_of(app) as client:
        for model in (None, "org/a", "m", "b"):
            body = {"prompt": "p"} if model is None else {"prompt": "p", "model": model}
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["model"] == (model or "m")
        listed = (await client.get("/v1/models")).json()["data"]
        shown = (await client.get("/v1/models/org/a")).json()
        error = await client.refused("/v1/completions", {"prompt": "p", "model": "c"}, 404)
    assert [request.adapter for request in backend.requests] == [None, "org/a", None, "b"]
    assert [(card["id"], card["parent"]) for card in listed] == [
        ("m", None),
        ("org/a", "m"),
        ("b", "m"),
    ]
    assert (shown["parent"], shown["state"], shown["root"]) == ("m", "running", "org/a")
    assert "Served: m, org/a, b" in error["message"]
