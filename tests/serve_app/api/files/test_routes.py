"""`/v1/files` through the application."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from tests.serve_app.apps import ALICE, BOB, AppClient, bearer, client_of, keeping, make_app, ring
from tests.serve_app.fakes import FakeBackend

CONTENTS = b'{"custom_id": "1"}\n'
FILES = "/v1/files"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[AppClient]:
    jobs = {"folder": str(folder), "max_file_bytes": 1024, "max_num_files": 3}
    async with keeping(make_app(FakeBackend(), ring(), jobs=jobs)) as client:
        client.headers = httpx.Headers(bearer(ALICE))
        yield client


async def upload(
    client: AppClient,
    contents: bytes = CONTENTS,
    status: int = 200,
    fields: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    data = {"purpose": "batch", **fields}
    answer = await client.post(FILES, data=data, files={"file": ("a.jsonl", contents)})
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_file_is_kept_shown_and_erased(client: AppClient, folder: Path) -> None:
    file = await upload(client)
    assert (file["bytes"], file["filename"], file["purpose"]) == (19, "a.jsonl", "batch")
    assert file["expires_at"] == file["created_at"] + 30 * 86400
    assert (await client.get(f"{FILES}/{file['id']}")).json() == file
    content = await client.get(f"{FILES}/{file['id']}/content")
    assert content.content == CONTENTS
    deleted = await client.delete(f"{FILES}/{file['id']}")
    assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert list((folder / "files").iterdir()) == []
    assert (await client.get(f"{FILES}/{file['id']}")).status_code == 404


async def test_a_key_sees_only_its_own_files(client: AppClient) -> None:
    file = await upload(client)
    for method, path in (
        ("GET", file["id"]),
        ("GET", f"{file['id']}/content"),
        ("DELETE", file["id"]),
    ):
        answer = await client.request(method, f"{FILES}/{path}", headers=bearer(BOB))
        assert answer.status_code == 404, method
    assert (await client.get(FILES, headers=bearer(BOB))).json()["data"] == []
    assert (await client.get(f"{FILES}/{file['id']}")).status_code == 200


async def test_a_page_of_another_site_may_upload_nothing_without_a_key(folder: Path) -> None:
    """Browsers send a form for any page, and only keep the answer from it."""
    app = make_app(FakeBackend(), jobs={"folder": str(folder)})
    async with keeping(app) as client:
        own = str(client.base_url)
        client.headers["origin"] = "http://elsewhere.example"
        refused = await upload(client, status=403)
        assert refused["error"]["code"] == "foreign_origin"
        client.headers["origin"] = own
        await upload(client)


async def test_a_page_that_knows_a_key_may_upload_from_anywhere(client: AppClient) -> None:
    client.headers["origin"] = "http://elsewhere.example"
    await upload(client)


async def test_a_list_has_pages(client: AppClient) -> None:
    ids = [(await upload(client))["id"] for _ in range(3)]
    first = (await client.get(FILES, params={"limit": 2})).json()
    assert [each["id"] for each in first["data"]] == [ids[2], ids[1]]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, ids[2], ids[1])
    rest = (await client.get(FILES, params={"limit": 2, "after": ids[1]})).json()
    assert [each["id"] for each in rest["data"]] == [ids[0]]
    assert not rest["has_more"]
    oldest = (await client.get(FILES, params={"order": "asc", "limit": 1})).json()
    assert oldest["data"][0]["id"] == ids[0]
    assert (await client.get(FILES, params={"purpose": "batch_output"})).json()["data"] == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"limit": "0"}, "limit must be at least 1."),
        ({"limit": "x"}, "limit must be a whole number."),
        ({"order": "up"}, "order must be 'asc' or 'desc'."),
    ],
)
async def test_a_wrong_parameter_is_named(
    client: AppClient, params: dict[str, str], message: str
) -> None:
    answer = await client.get(FILES, params=params)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message


async def test_what_is_too_much_is_refused_and_leaves_nothing(
    client: AppClient, folder: Path
) -> None:
    error = (await upload(client, b"x" * 1025, 413))["error"]
    assert "jobs.max_file_bytes" in error["message"]
    for _ in range(3):
        await upload(client)
    error = (await upload(client, status=403))["error"]
    assert (error["code"], "jobs.max_num_files" in error["message"]) == ("job_limit_reached", True)
    assert len(list((folder / "files").iterdir())) == 3


async def test_bytes_are_bounded_for_each_key(folder: Path) -> None:
    jobs = {"folder": str(folder), "max_stored_bytes": 1500}
    async with keeping(make_app(FakeBackend(), ring(), jobs=jobs)) as client:
        client.headers = httpx.Headers(bearer(ALICE))
        await upload(client, b"x" * 1000)
        error = (await upload(client, b"x" * 1000, 403))["error"]
        assert "jobs.max_stored_bytes" in error["message"]
        assert len(list((folder / "files").iterdir())) == 1
        client.headers = httpx.Headers(bearer(BOB))
        await upload(client, b"x" * 1000)


@pytest.mark.parametrize("charset", ["unicode_escape", "idna", "hex"])
async def test_a_filename_in_any_charset_leaves_a_file_or_nothing(
    client: AppClient, folder: Path, charset: str
) -> None:
    form = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\nContent-Disposition: form-data; name="file"; '
        f"filename*={charset}''a%5Cud800\r\n\r\n{{}}\r\n--b--\r\n"
    )
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await client.post(FILES, content=form, headers=headers)
    listed = (await client.get(FILES)).json()["data"]
    if charset == "idna":  # which knows no replacements
        assert (answer.status_code, listed) == (400, [])
    else:
        assert listed == [answer.json()]
    assert len(list((folder / "files").iterdir())) == len(listed)


async def test_a_length_that_is_too_large_names_the_limit_of_files(client: AppClient) -> None:
    answer = await client.post(FILES, content=b"x", headers={"content-length": "9" * 9})
    assert answer.status_code == 413
    assert "1024 bytes, the most that is kept (jobs.max_file_bytes)" in answer.text


async def test_a_client_may_want_a_file_erased_sooner(client: AppClient) -> None:
    wish = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = await upload(client, fields=wish)
    assert file["expires_at"] == file["created_at"] + 3600
    wish["expires_after[seconds]"] = "9" * 9
    error = (await upload(client, status=400, fields=wish))["error"]
    assert error["param"] == "expires_after[seconds]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"purpose": "vision"}, "purpose"), ({"user": "me"}, "user")],
)
async def test_fields_that_are_not_honoured_are_refused(
    client: AppClient, fields: dict[str, str], param: str
) -> None:
    assert (await upload(client, status=400, fields=fields))["error"]["param"] == param


async def test_a_form_needs_a_file_and_a_purpose(client: AppClient) -> None:
    answer = await client.post(FILES, files={"file": ("a.jsonl", b"")})
    assert answer.json()["error"]["param"] == "purpose"
    answer = await client.post(FILES, files={"purpose": (None, "batch")})
    assert answer.json()["error"]["param"] == "file"
    answer = await client.post(FILES, json={"purpose": "batch"})
    assert answer.status_code == 415


async def test_a_file_may_be_larger_than_other_bodies(folder: Path) -> None:
    limits = {"max_body_bytes": 1024}
    jobs = {"folder": str(folder), "max_file_bytes": 4096}
    async with keeping(make_app(FakeBackend(), limits=limits, jobs=jobs)) as client:
        assert (await upload(client, b"x" * 4000))["bytes"] == 4000


async def test_a_server_without_a_folder_says_what_to_set(tmp_path: Path) -> None:
    async with client_of(make_app(FakeBackend())) as client:
        for answer in (
            await client.get(FILES),
            await client.post(FILES, data={"purpose": "batch"}, files={"file": b""}),
            await client.get(f"{FILES}/x"),
            await client.get(f"{FILES}/x/content"),
            await client.delete(f"{FILES}/x"),
        ):
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "jobs_disabled"
            assert "jobs.folder" in answer.json()["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"


async def test_a_store_that_can_not_be_used_leaves_the_models_served(tmp_path: Path) -> None:
    jobs = {"folder": str(tmp_path / "missing" / "jobs")}
    async with keeping(make_app(FakeBackend(), jobs=jobs)) as client:
        answer = await client.get(FILES)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "jobs_unavailable")
        assert str(tmp_path) not in answer.text
        await client.ask("/v1/completions", {"prompt": "a"})
