"""What `/v1/devices` shows of a model."""

from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Shown:
    """What is shown of the model; `model` is the whole of it, as JSON."""

    model: dict[str, Any]

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """The replicas that have answered."""
        replicas: list[dict[str, Any]] = self.model["replicas"]
        return replicas

    @property
    def processes(self) -> list[int]:
        return [replica["process_id"] for replica in self.replicas]

    def total(self, name: str) -> int:
        """Return the sum of a number of their work."""
        return sum(replica["work"][name] for replica in self.replicas)


async def shown(client: httpx.AsyncClient, model_id: str = "pydoc-chat") -> Shown:
    answer = await client.get("/v1/devices")
    assert answer.status_code == 200, answer.text
    (model,) = (each for each in answer.json()["data"] if each["id"] == model_id)
    return Shown(model)
