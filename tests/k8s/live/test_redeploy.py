"""The configuration is changed and deployed again while clients stream."""

import httpx
import pytest

from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.k8s.live.load import Load
from tests.k8s.live.placement import ids_of, scaled
from tests.measured import Record

NUM_CLIENTS = 4
NAMES = ("os.path.join", "os.stat", "json.dumps")
BODIES = [about(name, max_tokens=200, **sampling) for name in NAMES for sampling in ({}, SEEDED)]


async def test_what_changes_in_place_disturbs_no_stream(
    client: httpx.AsyncClient, deployed: Deployed, record: Record
) -> None:
    await scaled(deployed, "pydoc-chat", 1)
    before = await ids_of(deployed)
    load = Load(client, BODIES, NUM_CLIENTS)
    async with load.running():
        section = deployed.section("pydoc-chat")
        section["user_config"] |= {"max_batch_size": 8, "max_queued_requests": 48}
        section["max_ongoing_requests"] = 500
        await scaled(deployed, "pydoc-chat", 2)
    after = await ids_of(deployed)
    load.check(record)
    assert before["pydoc-chat"] < after["pydoc-chat"]
    assert len(after["pydoc-chat"]) == 2
    assert before["pydoc-detector"] == after["pydoc-detector"]
    assert before["Ingress"] <= after["Ingress"]
    assert not any(answer.lost_at for answer in load.answers)


@pytest.mark.soak  # replicas of two versions take turns; tests/faults/served has shorter ones
async def test_a_changed_argument_replaces_all_replicas_and_fails_no_request(
    client: httpx.AsyncClient, deployed: Deployed, record: Record
) -> None:
    before = await ids_of(deployed)
    load = Load(client, BODIES, NUM_CLIENTS)
    async with load.running():
        deployed.application["args"]["limits"]["max_num_stops"] = 8
        await deployed.apply()
        await deployed.settled()
    after = await ids_of(deployed)
    load.check(record)
    for name, ids in after.items():
        assert not ids & before[name], name
