"""A graph of somebody else's that asks a model by `raystream.Model`, while the replica is killed.

`tests/raystream/test_model.py` loses replicas in process.
"""

from uuid import uuid4

import httpx

from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, is_alive, kill

STORY = {"name": "story", "route_prefix": "/story", "import_path": "tests.faults.served.graph:app"}
NUM_EARLY_CHARACTERS = 40


async def test_a_deployment_of_another_application_streams_the_same_text_through_a_death(
    client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas
) -> None:
    deployed.document["applications"].append(STORY)
    await deployed.apply()
    await deployed.settled()
    question = {"question": "What does os.path.join do?"}
    undisturbed = (await client.get("/story", params=question)).raise_for_status().text
    request_id = f"slow-{uuid4().hex}"
    headers = {"X-Request-Id": request_id}
    text = ""
    async with client.stream("GET", "/story", params=question, headers=headers) as answer:
        async for part in answer.aiter_text():
            text += part
            if len(text) >= NUM_EARLY_CHARACTERS and len(replicas.runs_of(request_id)) == 1:
                (first,) = replicas.runs_of(request_id)
                if is_alive(first):
                    kill(first)
    assert len(replicas.runs_of(request_id)) == 2, "another replica has gone on"
    assert text == undisturbed
