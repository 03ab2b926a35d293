"""`/v1/devices` under load, and after both replicas have died; test_hang.py silences one."""

from tests.faults.served.sizes import NUM_REPLICAS
from tests.faults.served.two_deaths import TwoDeaths


def test_all_replicas_are_shown_under_load(deaths: TwoDeaths) -> None:
    found = deaths.under_load
    assert set(deaths.victims) == set(found.processes)
    assert found.model["state"] == "running"
    assert found.model["num_replicas"] == {"RUNNING": NUM_REPLICAS}
    assert found.model["silent_replicas"] == []
    for replica in found.replicas:
        memory = replica["memory"]
        resident = deaths.rss_bytes[replica["process_id"]]
        assert 0.5 * resident < memory["use"]["process_bytes"] < 2 * resident
        assert replica["plan"]["kv_bytes"] > 0
        assert replica["work"]["num_prompt_tokens"] > 0
        assert len(memory["history"]["unix_s"]) == len(memory["history"]["process_bytes"]) > 1


def test_replicas_that_die_are_replaced_and_the_route_answers_meanwhile(deaths: TwoDeaths) -> None:
    before, after = deaths.under_load, deaths.replaced
    assert set(after.processes).isdisjoint(deaths.victims)
    assert after.model["num_started"] == before.model["num_started"] + NUM_REPLICAS
    assert after.total("num_moved_in") > 0
