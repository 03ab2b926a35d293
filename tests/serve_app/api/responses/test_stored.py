"""Responses with state: stored ones, their conversations, and those in the background."""

import asyncio
import json
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from deployments.contract.errors import (
    GenerationFailedError,
    JobsUnavailableError,
    OverloadedError,
)
from deployments.contract.output import FinishReason, TextDelta
from serve_app.api.responses import background
from serve_app.http.warning_header import WARNING_HEADER
from serve_app.jobs.leases import LEASE_S
from serve_app.jobs.response_log import Group, ResponseLog
from serve_app.jobs.responses import Responses
from serve_app.jobs.store import Store
from tests.offenders import for_each
from tests.serve_app.api.batches.test_routes import (
    DEADLINE_S,
    app_of,
    create,
    eventually,
    results,
    running,
    until,
)
from tests.serve_app.api.batches.test_routes import line as batch_line
from tests.serve_app.apps import ALICE, BOB, AppClient, bearer, keeping, make_app, ring
from tests.serve_app.fakes import CALL, HELLO, FakeBackend, FakeClock, Step, text_of

RESPONSES = "/v1/responses"
NEVER_S = 3600.0
HI: dict[str, Any] = {"model": "m", "input": "hi"}
TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


async def ask(client: AppClient, **fields: Any) -> dict[str, Any]:
    told: dict[str, Any] = (await client.ask(RESPONSES, {**HI, **fields})).json()
    return told


async def ended(client: AppClient, id_: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            told: dict[str, Any] = (await client.get(f"{RESPONSES}/{id_}")).json()
            if told["status"] not in ("queued", "in_progress"):
                return told
            await asyncio.sleep(0.01)


def texts_of(backend: FakeBackend, number: int) -> list[str]:
    prompt: Any = backend.requests[number].prompt
    return [part.text for message in prompt for part in message.parts]


async def events_of(client: AppClient, id_: str, after: int | None = None) -> list[Any]:
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    answer = await client.get(f"{RESPONSES}/{id_}", params=query)
    assert answer.status_code == 200, answer.text
    frames = [each for each in answer.text.split("\n\n") if each]
    return [json.loads(each.split("data: ")[1]) for each in frames]


async def test_a_response_is_stored_unless_its_request_says_otherwise(
    backend: FakeBackend, folder: Path
) -> None:
    async with running(app_of(backend, folder)) as client:
        told = await ask(client, metadata={"a": "b"})
        assert told["store"] is True
        shown = (await client.get(f"{RESPONSES}/{told['id']}")).json()
        Response.model_validate(shown)
        assert shown == told
        unstored = await ask(client, store=False)
        assert unstored["store"] is False
        assert (await client.get(f"{RESPONSES}/{unstored['id']}")).status_code == 404


async def test_a_setting_keeps_what_is_not_asked_to_be_stored(
    backend: FakeBackend, folder: Path
) -> None:
    async with running(app_of(backend, folder, store_responses_by_default=False)) as client:
        assert (await ask(client))["store"] is False
        assert (await ask(client, store=True))["store"] is True
        error = await client.refused(RESPONSES, {**HI, "background": True})
    assert error["param"] == "store"
    with sqlite3.connect(folder / "jobs.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM responses").fetchone() == (1,)
    connection.close()


async def test_a_client_can_not_choose_the_id_of_a_stored_response(
    backend: FakeBackend, folder: Path
) -> None:
    async with running(app_of(backend, folder)) as client:
        headers = {"x-request-id": "mine"}
        ids = {(await client.ask(RESPONSES, HI, 200, headers)).json()["id"] for _ in range(2)}
    assert len(ids) == 2
    assert "resp_mine" not in ids


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_that_follows_renders_as_if_all_had_been_sent(
    folder: Path, is_streamed: bool
) -> None:
    backend = FakeBackend(tool_call_format="hermes")
    backend.reason()
    async with running(app_of(backend, folder)) as client:
        backend.scripts = [
            [
                [TextDelta((8, 1), "<think>Hm.")],
                [TextDelta((9, 2), "</think>")],
                *text_of(CALL),
            ]
        ]
        asked: dict[str, Any] = {"tools": [TOOL], "instructions": "Be brief."}
        first = await ask(client, **asked)
        kinds = [item["type"] for item in first["output"]]
        assert kinds == ["reasoning", "function_call"]
        call_id = first["output"][1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "4"}
        follows = {"previous_response_id": first["id"], "input": [result], **asked}
        answer = await client.ask(RESPONSES, {**HI, **follows, "stream": is_streamed})
        if is_streamed:
            last = json.loads(answer.text.removesuffix("\n\n").split("data: ")[-1])["response"]
        else:
            last = answer.json()
        assert last["previous_response_id"] == first["id"]
        await ask(client, previous_response_id=last["id"], input="And?", **asked)
        whole = [{"role": "user", "content": "hi"}, *first["output"], result]
        await ask(client, store=False, input=whole, **asked)
        whole += [*last["output"], {"role": "user", "content": "And?"}]
        await ask(client, store=False, input=whole, **asked)
    _, second, third, second_whole, third_whole = (each.prompt for each in backend.requests)
    assert second == second_whole
    assert third == third_whole
    assert len(third) > len(second) > 3


async def test_the_instructions_are_not_carried_over(backend: FakeBackend, folder: Path) -> None:
    async with running(app_of(backend, folder)) as client:
        first = await ask(client, instructions="Shout.")
        await ask(client, previous_response_id=first["id"], input="again")
    assert texts_of(backend, 0) == ["Shout.", "hi"]
    assert texts_of(backend, 1) == ["hi", "Hello, world!", "again"]


async def test_the_input_items_are_the_conversation(backend: FakeBackend, folder: Path) -> None:
    async with running(app_of(backend, folder)) as client:
        first = await ask(client)
        second = await ask(client, previous_response_id=first["id"], input="again")
        path = f"{RESPONSES}/{second['id']}/input_items"
        page = (await client.get(path, params={"order": "asc"})).json()
        assert [item["role"] for item in page["data"]] == ["user", "assistant", "user"]
        assert page["data"][1] == first["output"][0]
        assert not page["has_more"]
        newest = (await client.get(path, params={"limit": 1})).json()
        assert newest["data"] == page["data"][:1:-1]
        assert newest["has_more"]
        rest = (await client.get(path, params={"after": newest["last_id"]})).json()
        assert rest["data"] == page["data"][1::-1]
        assert (await client.get(path, params={"after": "x"})).status_code == 400


async def test_a_key_sees_only_its_own(backend: FakeBackend, folder: Path) -> None:
    app = make_app(backend, keys=ring(), jobs={"folder": str(folder)})
    async with running(app, ALICE) as client:
        told = await ask(client, background=True)
        await ended(client, told["id"])
        client.headers = httpx.Headers(bearer(BOB))
        path = f"{RESPONSES}/{told['id']}"
        for answer in (
            await client.get(path),
            await client.get(path, params={"stream": "true"}),
            await client.get(f"{path}/input_items"),
            await client.post(f"{path}/cancel"),
            await client.delete(path),
        ):
            assert answer.status_code == 404
        error = await client.refused(RESPONSES, {**HI, "previous_response_id": told["id"]})
        assert (error["code"], error["param"]) == (
            "previous_response_not_found",
            "previous_response_id",
        )
        client.headers = httpx.Headers(bearer(ALICE))
        assert (await client.get(path)).status_code == 200


async def test_what_is_deleted_is_erased_and_can_not_be_followed(
    backend: FakeBackend, folder: Path
) -> None:
    async with running(app_of(backend, folder)) as client:
        first = await ask(client, input="a secret of mine", background=True)
        await ended(client, first["id"])
        second = await ask(client, previous_response_id=first["id"], input="b")
        path = f"{RESPONSES}/{first['id']}"
        deleted = (await client.delete(path)).json()
        assert deleted == {"id": first["id"], "object": "response", "deleted": True}
        assert (await client.get(path)).status_code == 404
        assert (await client.delete(path)).status_code == 404
        for id_ in (first["id"], second["id"]):
            error = await client.refused(RESPONSES, {**HI, "previous_response_id": id_})
            assert error["code"] == "previous_response_not_found"
        assert (await client.get(f"{RESPONSES}/{second['id']}")).status_code == 200
    # The last connection empties SQLite's log, and erased rows are overwritten.
    assert b"a secret of mine" not in (folder / "jobs.sqlite").read_bytes()


async def test_a_full_store_is_named_and_serving_goes_on(
    backend: FakeBackend, folder: Path
) -> None:
    async with running(app_of(backend, folder, max_num_responses=1)) as client:
        first = await ask(client)
        answer = await client.ask(RESPONSES, HI)
        assert answer.json()["store"] is False
        assert "jobs.max_num_responses" in answer.headers[WARNING_HEADER]
        for fields in ({"store": True}, {"background": True}):
            error = await client.refused(RESPONSES, {**HI, **fields}, 403)
            assert error["code"] == "job_limit_reached"
        await client.delete(f"{RESPONSES}/{first['id']}")
        assert (await ask(client))["store"] is True


async def test_the_bytes_of_a_key_are_bounded(backend: FakeBackend, folder: Path) -> None:
    async with running(app_of(backend, folder, max_responses_bytes=2048)) as client:
        await ask(client, input="x" * 2048)
        error = await client.refused(RESPONSES, {**HI, "store": True}, 403)
    assert "jobs.max_responses_bytes" in error["message"]


async def test_a_store_that_can_not_be_used_is_named_and_serving_goes_on(
    backend: FakeBackend, tmp_path: Path
) -> None:
    async with running(app_of(backend, tmp_path / "volume" / "jobs")) as client:
        answer = await client.ask(RESPONSES, HI)
        assert answer.json()["store"] is False
        assert "not stored" in answer.headers[WARNING_HEADER]
        for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            error = await client.refused(RESPONSES, {**HI, **fields}, 503)
            assert error["code"] == "jobs_unavailable"
        assert (await client.get(f"{RESPONSES}/resp_1")).status_code == 503
        (tmp_path / "volume").mkdir()
        assert (await ask(client))["store"] is True


@pytest.mark.parametrize(
    ("damage", "reason"),
    [("cut", "malformed"), ("version", "version 7"), ("read-only", "[Pp]ermi|[Rr]ead-only")],
)
async def test_a_damaged_store_is_named_and_serving_goes_on(
    backend: FakeBackend, folder: Path, damage: str, reason: str
) -> None:
    if damage == "read-only":
        folder = Path("/sys/kernel/jobs")  # no user may make a folder there
    else:
        async with running(app_of(backend, folder)) as client:
            for _ in range(20):
                await ask(client, input="x" * 2048)
        database = folder / "jobs.sqlite"
        if damage == "cut":
            os.truncate(database, database.stat().st_size // 2)
        else:
            with sqlite3.connect(database) as connection:
                connection.execute("PRAGMA user_version = 7")
            connection.close()
    async with running(app_of(backend, folder)) as client:
        await unusable(client, reason)


async def unusable(client: AppClient, reason: str) -> None:
    """Check that what needs the store is refused with a reason, and all else is answered."""
    answer = await client.ask(RESPONSES, HI)
    assert (answer.json()["status"], answer.json()["store"]) == ("completed", False)
    assert re.search(reason, answer.headers[WARNING_HEADER])
    answer = await client.ask(RESPONSES, {**HI, "store": False})
    assert answer.json()["status"] == "completed"
    assert WARNING_HEADER not in answer.headers
    for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
        error = await client.refused(RESPONSES, {**HI, **fields}, 503)
        assert error["code"] == "jobs_unavailable"
        assert re.search(reason, error["message"])


async def test_a_full_disk_loses_no_answer_and_refuses_the_background(
    backend: FakeBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 2**16  # needs pages of its own
    async with running(app_of(backend, folder)) as client:
        first = await ask(client)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "open", on_a_full_disk(Store.open))
        async with running(app_of(backend, folder)) as client:
            for fields in ({}, {"store": True}, {"previous_response_id": first["id"]}):
                answer = await client.ask(RESPONSES, {**HI, "input": long, **fields})
                assert (answer.json()["status"], answer.json()["store"]) == ("completed", False)
                assert re.search("not stored.*disk is full", answer.headers[WARNING_HEADER])
            answer = await client.ask(RESPONSES, {**HI, "store": False})
            assert WARNING_HEADER not in answer.headers
            asked = {**HI, "input": long, "background": True}
            error = await client.refused(RESPONSES, asked, 503)
            assert (error["code"], "disk is full" in error["message"]) == ("jobs_unavailable", True)
            assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first
    async with running(app_of(backend, folder)) as client:
        assert (await ask(client, input=long))["store"] is True


def on_a_full_disk(
    opened: Callable[[Store], sqlite3.Connection],
) -> Callable[[Store], sqlite3.Connection]:
    """Let the database have no more pages than it has: SQLite then says what a full disk says."""

    def full(store: Store) -> sqlite3.Connection:
        connection = opened(store)
        connection.execute("PRAGMA max_page_count = 1")  # never below what there are
        return connection

    return full


async def test_an_answer_is_not_lost_when_the_store_fails_behind_it(
    backend: FakeBackend, folder: Path
) -> None:
    held = asyncio.Event()
    async with running(app_of(backend, folder)) as client:
        for is_streamed in (False, True):
            backend.steps = [HELLO[0], held, *HELLO[1:]]
            backend.opened.clear()
            asking = asyncio.create_task(
                client.ask(RESPONSES, {**HI, "store": True, "stream": is_streamed})
            )
            await backend.opened.wait()
            with sqlite3.connect(folder / "jobs.sqlite") as connection:
                connection.execute("ALTER TABLE responses RENAME TO others")
            connection.close()
            held.set()
            text = (await asking).text
            told = json.loads(text.removesuffix("\n\n").split("data: ")[-1])
            told = told["response"] if is_streamed else told
            assert (told["status"], told["store"]) == ("completed", False)
            assert told["output"][0]["content"][0]["text"] == "Hello, world!"
            with sqlite3.connect(folder / "jobs.sqlite") as connection:
                connection.execute("ALTER TABLE others RENAME TO responses")
            connection.close()


async def test_the_lines_of_a_batch_are_stored_only_if_they_say_so(
    backend: FakeBackend, folder: Path
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "plain": {"input": "a"},
        "stored": {"input": "a", "store": True},
        "background": {"input": "a", "background": True, "store": True},
    }
    async with running(app_of(backend, folder)) as client:
        lines = [batch_line(id_, body, RESPONSES) for id_, body in bodies.items()]
        batch = await until(client, (await create(client, lines, RESPONSES))["id"], "completed")
        found = await results(client, batch["output_file_id"])
        assert {id_: each["response"]["body"]["store"] for id_, each in found.items()} == {
            "plain": False,
            "stored": True,
        }
        errors = await results(client, batch["error_file_id"])
        assert errors["background"]["response"]["body"]["error"]["param"] == "background"


async def test_a_response_in_the_background_goes_on_without_its_client(
    backend: FakeBackend, folder: Path
) -> None:
    async with running(app_of(backend, folder)) as client:
        told = await ask(client, background=True, max_output_tokens=9, metadata={"a": "b"})
        Response.model_validate(told)
        assert (told["status"], told["background"], told["output"]) == ("queued", True, [])
        done = await ended(client, told["id"])
        Response.model_validate(done)
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["text"] == "Hello, world!"
        assert (done["metadata"], done["usage"]["output_tokens"]) == ({"a": "b"}, 5)
        assert backend.requests[0].sampling.max_tokens == 9
        events = await events_of(client, told["id"])
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"]
        assert kinds[-1] == "completed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"] == done
        for after in range(len(events) + 1):
            assert await events_of(client, told["id"], after) == events[after + 1 :]
        follows = await ask(client, previous_response_id=told["id"], input="b", background=True)
        assert (await ended(client, follows["id"]))["status"] == "completed"
        assert texts_of(backend, 1) == ["hi", "Hello, world!", "b"]


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_events_that_are_read_as_they_come_are_those_that_are_read_later(
    backend: FakeBackend, folder: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    held = asyncio.Event()
    backend.steps = [HELLO[0], held, *HELLO[1:]]
    if not is_elsewhere:  # then the ingress that runs the response wakes its readers
        monkeypatch.setattr(background, "FOLLOW_S", NEVER_S)
        monkeypatch.setattr(background, "FOLLOW_HERE_S", NEVER_S)
    async with (
        running(app_of(backend, folder)) as client,
        keeping(app_of(FakeBackend(), folder)) as other,
    ):
        told = await ask(client, background=True)
        await eventually(lambda: bool(backend.streams) and backend.streams[0].waits.is_set())
        reading = asyncio.create_task(events_of(other if is_elsewhere else client, told["id"]))
        held.set()
        async with asyncio.timeout(DEADLINE_S):
            events = await reading
        assert events == await events_of(client, told["id"])
        assert events[-1]["type"] == "response.completed"


async def test_a_reader_of_a_response_that_is_cancelled_or_deleted_is_told_at_once(
    backend: FakeBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.steps = [HELLO[0], asyncio.Event()]
    for each in ("FOLLOW_S", "FOLLOW_HERE_S"):
        monkeypatch.setattr(background, each, NEVER_S)
    events, has_read = ResponseLog.events, asyncio.Event()

    async def noted(log: ResponseLog, owner: str, id_: str, after: int) -> Any:
        found = await events(log, owner, id_, after)
        has_read.set()
        return found

    monkeypatch.setattr(ResponseLog, "events", noted)
    async with running(app_of(backend, folder)) as client:
        for number, (method, end) in enumerate((("POST", "/cancel"), ("DELETE", ""))):
            told = await ask(client, background=True)
            await eventually(lambda: len(backend.streams) > number)  # noqa: B023 - awaited here
            await backend.streams[number].waits.wait()
            has_read.clear()
            reading = asyncio.create_task(events_of(client, told["id"]))
            await has_read.wait()
            await client.request(method, f"{RESPONSES}/{told['id']}{end}")
            async with asyncio.timeout(DEADLINE_S):
                await reading


async def test_a_response_whose_run_has_failed_is_claimed_again_beside_one_that_runs(
    backend: FakeBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, held = FakeClock(), asyncio.Event()
    backend.scripts = [[HELLO[0], held, *HELLO[1:]]]
    groups, failed = ResponseLog.groups, asyncio.Event()

    async def fails_once(log: ResponseLog, response: int) -> list[Group]:
        if not failed.is_set():
            failed.set()
            raise JobsUnavailableError("The disk has failed for a moment.")
        return await groups(log, response)

    async with running(app_of(backend, folder, clock)) as client:
        first = await ask(client, background=True)
        await eventually(lambda: bool(backend.streams) and backend.streams[0].waits.is_set())
        monkeypatch.setattr(ResponseLog, "groups", fails_once)
        second = await ask(client, background=True)
        async with asyncio.timeout(DEADLINE_S):
            await failed.wait()
        clock.now_s += LEASE_S + 1
        assert (await ended(client, second["id"]))["status"] == "completed"
        held.set()
        assert (await ended(client, first["id"]))["status"] == "completed"
    assert len(backend.requests) == 2


async def test_erasing_what_is_old_holds_up_no_response(
    backend: FakeBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()

    async def takes_long(responses: Responses) -> None:
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Responses, "expire", takes_long)
    async with running(app_of(backend, folder)) as client:
        async with asyncio.timeout(DEADLINE_S):
            await began.wait()
        told = await ask(client, background=True)
        assert (await ended(client, told["id"]))["status"] == "completed"


async def test_a_cancelled_response_leaves_its_replica(backend: FakeBackend, folder: Path) -> None:
    backend.steps = [HELLO[0], asyncio.Event(), *HELLO[1:]]
    async with running(app_of(backend, folder)) as client:
        told = await ask(client, background=True)
        await eventually(lambda: bool(backend.streams) and backend.streams[0].waits.is_set())
        path = f"{RESPONSES}/{told['id']}"
        error = await client.refused(RESPONSES, {**HI, "previous_response_id": told["id"]}, 409)
        assert error["param"] == "previous_response_id"
        cancelled = (await client.post(f"{path}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        async with asyncio.timeout(20):
            await backend.streams[0].closed.wait()
        assert (await client.post(f"{path}/cancel")).json() == cancelled
        assert (await client.get(path)).json() == cancelled
        assert (await events_of(client, told["id"]))[-1]["type"] != "response.completed"


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_response_that_is_deleted_while_it_runs_leaves_its_replica(
    backend: FakeBackend, folder: Path, is_deleted: bool
) -> None:
    backend.steps = [HELLO[0], asyncio.Event()]
    async with running(app_of(backend, folder)) as client:
        told = await ask(client, background=True)
        await eventually(lambda: bool(backend.streams) and backend.streams[0].waits.is_set())
        if is_deleted:
            await client.delete(f"{RESPONSES}/{told['id']}")
            async with asyncio.timeout(20):
                await backend.streams[0].closed.wait()
    assert backend.streams[0].closed.is_set()  # the end of the application closes it, too


async def test_only_the_background_can_be_cancelled_and_read_by_events(
    backend: FakeBackend, folder: Path
) -> None:
    async with running(app_of(backend, folder)) as client:
        path = f"{RESPONSES}/{(await ask(client))['id']}"
        assert (await client.post(f"{path}/cancel")).status_code == 409
        answer = await client.get(path, params={"stream": "true"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_a_response_that_finds_no_room_waits_for_it(
    backend: FakeBackend, folder: Path
) -> None:
    backend.scripts = [OverloadedError("no", None, 0), HELLO]
    async with running(app_of(backend, folder)) as client:
        told = await ask(client, background=True)
        assert (await ended(client, told["id"]))["status"] == "completed"
    assert len(backend.requests) == 2


@for_each([GenerationFailedError("broken")], [HELLO[0], GenerationFailedError("broken")])
async def test_a_failure_ends_a_response_in_the_background(
    steps: list[Step], backend: FakeBackend, folder: Path
) -> None:
    backend.steps = steps
    async with running(app_of(backend, folder)) as client:
        told = await ask(client, background=True)
        failed = await ended(client, told["id"])
        assert (failed["status"], failed["error"]["message"]) == ("failed", "broken")
        events = await events_of(client, told["id"])
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"] == failed
        error = await client.refused(RESPONSES, {**HI, "previous_response_id": told["id"]}, 409)
        assert "failed" in error["message"]


async def test_a_replica_s_refusal_ends_a_response_in_the_background(
    backend: FakeBackend, folder: Path
) -> None:
    backend.refusal = GenerationFailedError("never")
    async with running(app_of(backend, folder)) as client:
        told = await ask(client, background=True)
        assert (await ended(client, told["id"]))["error"]["message"] == "never"
        assert (await events_of(client, told["id"]))[-1]["type"] == "response.failed"


@pytest.mark.parametrize("num_tokens", range(1, 5))
async def test_another_ingress_goes_on_behind_what_is_logged(folder: Path, num_tokens: int) -> None:
    """The first ingress ends in the middle; the second one has the tokens, and the rest follows."""
    pieces = ["Let me ", CALL[:30], CALL[30:], " done"]
    steps = text_of(*pieces)
    backend = FakeBackend(tool_call_format="hermes")
    backend.steps = [*steps[:num_tokens], asyncio.Event()]
    async with running(app_of(backend, folder)) as client:
        told = await ask(client, background=True, tools=[TOOL], parallel_tool_calls=True)
        await eventually(lambda: bool(backend.streams) and backend.streams[0].waits.is_set())
        await eventually(lambda: num_logged(folder) >= 2)
    other = FakeBackend(tool_call_format="hermes")
    other.steps = [[TextDelta((98,), "", FinishReason.STOP)]]
    async with running(app_of(other, folder)) as client:
        await eventually(lambda: bool(other.requests))
        resumed = other.requests[0]
        known = list(resumed.generated_token_ids)
        assert known == list(range(len(known)))
        assert resumed.is_resumed == bool(known)
        assert resumed.sampling.seed == backend.requests[0].sampling.seed
        assert resumed.prompt == backend.requests[0].prompt
        done = await ended(client, told["id"])
        assert done["status"] == "completed"
        events = await events_of(client, told["id"])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"] == done["output"]
        calls = {
            event["item"]["call_id"]
            for event in events
            if event["type"].startswith("response.output_item")
            and event["item"]["type"] == "function_call"
        }
        assert calls == {
            item["call_id"] for item in done["output"] if item["type"] == "function_call"
        }


def num_logged(folder: Path) -> int:
    with sqlite3.connect(folder / "jobs.sqlite") as connection:
        (found,) = connection.execute("SELECT count(*) FROM response_events").fetchone()
    connection.close()
    return int(found)


async def test_without_a_folder_nothing_is_stored_and_the_routes_say_which_key_to_set(
    backend: FakeBackend,
) -> None:
    async with running(make_app(backend)) as client:
        assert (await ask(client, store=True))["store"] is False
        answer = await client.get(f"{RESPONSES}/resp_1")
        assert answer.status_code == 403
        assert "jobs.folder" in answer.json()["error"]["message"]
