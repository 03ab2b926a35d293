"""The page with fake models behind a real socket, in a real browser."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Locator

from deployments.plan.replica_report import ReplicaReport
from serve_app.backends.models.devices import DeviceSources
from serve_app.backends.models.operator_actions import Scaling
from serve_app.backends.models.serving_states import DeploymentState
from serve_app.backends.replicas.replica_reports import Reports
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing
from serve_app.metrics import IngressMetrics
from tests.browser import Tab, tab_of
from tests.replica_reports import cpu_report, gpu_report
from tests.serve_app.fake_pooler import FakeClassifier, FakeEmbedder
from tests.serve_app.fakes import FakeBackend, FakeClock
from tests.serve_app.front_doors import on_uvicorn
from tests.serve_app.test_sleeping_models import Sleeper

MODELS = [
    {"id": "m", "source": "nowhere"},
    {"id": "c", "source": "nowhere", "task": "classify"},
    {"id": "e", "source": "nowhere", "task": "embed"},
]


class Operated(Sleeper):
    """A sleeper that operators act on, with Serve's scaling of it; see `ScalingControl`."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = Scaling(0, has_load_policy=True)
        self.wish: str | None = None

    async def ping(self) -> None:
        await super().ping()
        await self.loads.wait()
        self.run()

    async def states(self) -> dict[str, DeploymentState]:
        told = replace(
            (await super().states())["m"],
            is_pinned=self.wish == "pin",
            is_going_to_sleep=self.wish == "sleep",
        )
        return {"m": told}

    async def scaling_of(self, deployment: str) -> Scaling:
        assert deployment == "m"
        return replace(self.scaling, is_pinned=self.wish == "pin")

    async def pin(self, deployment: str) -> None:
        self.wish = "pin"

    async def end(self, deployment: str) -> bool:
        self.wish = "sleep"
        return self.replicas.has_any

    async def unpin(self, deployment: str) -> None:
        self.wish = None if self.wish == "pin" else self.wish

    async def keep(self, deployment: str) -> None:
        self.wish = None if self.wish == "sleep" else self.wish


@dataclass
class Models:
    """The fakes behind the page: `m` generates, `c` classifies and `e` embeds."""

    chat: FakeBackend = field(default_factory=FakeBackend)
    classifier: FakeClassifier = field(default_factory=FakeClassifier)
    embedder: FakeEmbedder = field(default_factory=FakeEmbedder)
    served: str = "mce"
    folder: Path | None = None  # where files and batches are kept, if they are
    reports: Mapping[str, tuple[ReplicaReport, ...]] = field(
        default_factory=lambda: {"m": (gpu_report("r1"), gpu_report("r2")), "c": (cpu_report(),)}
    )

    async def ask(self, model_id: str, is_any_running: bool) -> Reports:
        """Return the reports of a model's replicas."""
        reports = self.reports.get(model_id, ())
        return Reports(reports, (), len(reports))


@asynccontextmanager
async def serving(
    models: Models, monkeypatch: pytest.MonkeyPatch, keys: KeyRing | None = None
) -> AsyncIterator[str]:
    """Serve the application on a port of this machine; yield its address."""
    entries = [entry for entry in MODELS if entry["id"] in models.served]
    folder = None if models.folder is None else str(models.folder)
    config = AppConfig.model_validate({"models": entries, "jobs": {"folder": folder}})
    app = build_app(
        AppParts(
            config,
            {"m": models.chat},
            {"c": models.classifier} if "c" in models.served else {},
            {"e": models.embedder} if "e" in models.served else {},
            clock=FakeClock(),
            metrics=IngressMetrics(models.served),
            keys=keys,
            host="127.0.0.1",
            devices=DeviceSources({id_: _asking(models, id_) for id_ in models.served}),
            **(_asleep(models.chat) if isinstance(models.chat, Sleeper) else {}),
        )
    )
    # Serve's uvicorn leaves the lifespan to the replica.
    async with app.router.lifespan_context(app), on_uvicorn(app, monkeypatch) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def opened(
    browser: Browser, models: Models, monkeypatch: pytest.MonkeyPatch, keys: KeyRing | None = None
) -> AsyncIterator["Page"]:
    """Serve the application, and open a tab for its page."""
    async with serving(models, monkeypatch, keys) as url, tab_of(browser) as tab:
        yield Page(tab, url, models)


def _asking(models: Models, model_id: str) -> Any:
    return lambda is_any_running: models.ask(model_id, is_any_running)


def _asleep(sleeper: Sleeper) -> dict[str, Any]:
    return {
        "replicas": {"m": sleeper.replicas},
        "describe_files": sleeper.describe_files,
        "ask_states": sleeper.states,
        "scaling": sleeper if isinstance(sleeper, Operated) else None,
    }


class Page:
    """The page as its user sees it."""

    def __init__(self, tab: Tab, url: str, models: Models | None = None) -> None:
        self.tab = tab
        self.url = url
        self.page = tab.page
        self._models = models

    @property
    def models(self) -> Models:
        """The fakes behind a page that no real server serves."""
        assert self._models is not None
        return self._models

    async def open(self, tab: str = "chat") -> None:
        """Open the page at one of its tabs, and wait until it is drawn."""
        await self.page.goto(f"{self.url}/#{tab}")
        await self.page.get_by_role("tablist").wait_for()

    async def show(self, tab: str) -> None:
        """Choose a tab by its name."""
        await self.page.get_by_role("tab", name=tab).click()

    async def ask(self, text: str) -> None:
        """Send a message."""
        await self.page.get_by_label("Your message").fill(text)
        await self.button("Send").click()

    async def ask_anew(self, text: str) -> None:
        """Send the first message of a new conversation, and wait for the whole answer."""
        if await self.answer.count():
            await self.button("New chat").click()
            await self.answer.wait_for(state="detached")
        await self.ask(text)
        await self.is_done()

    async def search(self, query: str) -> None:
        """Search, and wait for what is found."""
        await self.page.get_by_label("What should it do?").fill(query)
        await self.button("Search").click()
        found = self.page.get_by_role("region", name=f'Entries found for "{query}"')
        await found.get_by_text("Copy as code").wait_for()
        await self.page.get_by_role("status").filter(has_text="The best").wait_for()

    def button(self, name: str, exact: bool = True) -> Locator:
        return self.page.get_by_role("button", name=name, exact=exact)

    @property
    def answer(self) -> Locator:
        return self.page.get_by_role("article", name="Answer").last

    async def says(self, text: str) -> None:
        """Wait until the last answer holds a text."""
        await self.answer.get_by_text(text).first.wait_for()

    async def is_done(self) -> None:
        """Wait until the last answer has ended."""
        await self.answer.and_(self.page.locator("[aria-busy=false]")).wait_for()

    async def is_wider_than_the_window(self) -> bool:
        """Whether one has to scroll sideways."""
        found: bool = await self.tab.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )
        return found

    async def run_batch(self, *prompts: str) -> str:
        """Start a batch of completions; return its id."""
        lines = [
            {
                "custom_id": prompt,
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": prompt},
            }
            for prompt in prompts
        ]
        text = "\n".join(json.dumps(each) for each in lines)
        async with httpx.AsyncClient(base_url=self.url) as client:
            file = await client.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", text)}
            )
            asked = {
                "input_file_id": file.json()["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            batch = await client.post("/v1/batches", json=asked)
        id_: str = batch.json()["id"]
        return id_

    def check_quiet(self) -> None:
        """Fail if the page has complained, or asked another host."""
        assert self.tab.complaints == [], self.tab.complaints
        assert self.tab.foreign(self.url, "data:", "blob:") == []
