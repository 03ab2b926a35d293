"""The applications of this Ray cluster whose models are asked from Python.

Each event loop that asks has connections of its own to their replicas. They are made for the first
request, and closed with the loop. What an application serves is asked of its ingress, and again
from time to time, because another file may have been deployed.
"""

import asyncio
import logging
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Final, cast

import ray
from ray import serve
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] # no stubs
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview

from deployments.contract.errors import ModelNotFoundError, RaystreamError, ReplicaUnavailableError
from deployments.contract.model_spec import deployment_name_of
from serve_app.api.requests.context import ApiContext
from serve_app.backends.models.serving_states import ServingStates
from serve_app.backends.replicas.handles import Handle, translated_errors
from serve_app.clock import SystemClock
from serve_app.commands.run.server_record import own_servers
from serve_app.commands.server_environment import AUTH_MODE, TOKEN_FILE
from serve_app.config import INGRESS_NAME, MODELS_NAME
from serve_app.images.fetcher import ImageFetcher
from serve_app.middleware.auth import is_loopback
from serve_app.served_models import ApplicationDescription, HandleModels, catalog_of

logger = logging.getLogger("raystream")

ROOTS: Final = (INGRESS_NAME, MODELS_NAME)
"""The deployments that describe an application: it has one of the two."""

NOT_JOINED: Final = (
    "The Ray at {} can't be joined. Does it run? If it asks for a token, set RAY_AUTH_MODE=token; "
    "the token lies in ~/.ray/auth_token, or where RAY_AUTH_TOKEN_PATH says."
)

ADDRESS: Final = "RAY_ADDRESS"
AUTO: Final = "auto"

MAX_AGE_S: Final = 10.0
"""After how long an application is asked again what it serves."""

_connecting: Final = threading.Lock()
"""Held while Ray is joined: to do so twice is an error."""

NO_SERVER: Final = (
    "No Ray runs that this process could connect to: start a server by `raystream serve`, or call "
    "ray.init(address=...) first."
)


class Application:
    """An application as one event loop reaches it, until another file is deployed."""

    def __init__(self, name: str, description: ApplicationDescription) -> None:
        """Make the handles; connections follow with the first requests.

        Args:
            name: The application.
            description: What it serves.
        """
        config = description.config
        self.description = description
        self.note_asked()
        self._models = HandleModels.of(
            config,
            {
                model.id: serve.get_deployment_handle(model.deployment_name, name)
                for model in config.models
            },
            description.specs,
            name,
        )
        states = ServingStates(self._models.ask_states)
        self.context = ApiContext(
            catalog_of(self._models, states),
            config.limits,
            SystemClock(),
            ImageFetcher(config.limits),
            structured_outputs=config.structured_outputs,
        )
        self._num_requests = 0
        self._is_retired = False
        self._watching = asyncio.ensure_future(self._watch())

    @property
    def is_old(self) -> bool:
        """Whether another file may have been deployed since it was asked."""
        return asyncio.get_running_loop().time() - self._asked_s > MAX_AGE_S

    def note_asked(self) -> None:
        """Note that it was asked now."""
        self._asked_s = asyncio.get_running_loop().time()

    def serves(self, model_id: str | None) -> bool:
        """Return whether it has a model of this id; None stands for any."""
        return model_id is None or any(
            model.id == model_id for model in self.description.config.models
        )

    @asynccontextmanager
    async def requested(self) -> AsyncIterator[ApiContext]:
        """Keep the connections open for a request."""
        self._num_requests += 1
        try:
            yield self.context
        finally:
            self._num_requests -= 1
            self._close_if_done()

    def retire(self) -> None:
        """Close the connections once the last request has ended."""
        self._is_retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_retired and not self._num_requests:
            self._watching.cancel()

    async def _watch(self) -> None:
        """Watch the replicas; close the connections when this task is cancelled, or the loop ends.

        Neither a failed watch nor the end of one ends the others: requests go on without it.
        """
        try:
            watches = (each() for each in self._models.watches)
            await asyncio.gather(*watches, return_exceptions=True)
            await asyncio.get_running_loop().create_future()
        finally:
            await self._models.aclose()


class Applications:
    """The applications as one event loop reaches them."""

    def __init__(self) -> None:
        self._open: dict[str, Application] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._homes: dict[str | None, str] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def of(self, model_id: str | None, name: str | None) -> Application:
        """Return the application that a request goes to; see `Model`.

        Raises:
            ModelNotFoundError: No application serves the model, or several do.
            RaystreamError: The application can't be reached.
        """
        if name is not None:
            return await self._current(name, model_id)
        with suppress(ModelNotFoundError):
            found = await self._current(await self._home_of(model_id), model_id)
            if found.serves(model_id):
                return found
        self._homes.pop(model_id, None)  # the model has moved to another application
        return await self._current(await self._home_of(model_id), model_id)

    async def _current(self, name: str, model_id: str | None) -> Application:
        """Return an application, asked again if it is not known to serve the model."""
        async with self._locks[name]:
            found = self._open.get(name)
            if found is None or not found.serves(model_id):
                found = await self._ask(name)
        if found.is_old and name not in self._asking:
            asking = self._asking[name] = asyncio.ensure_future(self._ask_again(name))
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        return found

    async def _home_of(self, model_id: str | None) -> str:
        if model_id not in self._homes:
            self._homes[model_id] = await asyncio.to_thread(find_application, model_id)
        return self._homes[model_id]

    async def _ask(self, name: str) -> Application:
        """Ask an application what it serves, and return it as it is now.

        Raises:
            RaystreamError: The application can't be reached.
        """
        try:
            description = await describe(name)
        except BaseException:
            self._homes = {id_: home for id_, home in self._homes.items() if home != name}
            raise
        known = self._open.get(name)
        if known is not None and known.description == description:
            known.note_asked()
            return known
        self._open[name] = Application(name, description)
        if known is not None:
            known.retire()
        return self._open[name]

    async def _ask_again(self, name: str) -> None:
        """Ask an application again while requests go on; if it is silent, look for it again."""
        try:
            async with asyncio.timeout(MAX_AGE_S):
                await self._ask(name)
        except TimeoutError:
            self._open[name].note_asked()  # its models serve without its ingress
        except RaystreamError as error:
            logger.info("the application %s is looked for again: %s", name, error)
            self._open.pop(name).retire()


async def describe(name: str) -> ApplicationDescription:
    """Ask an application what it serves.

    Raises:
        ModelNotFoundError: There is no such application of ours.
        RaystreamError: It does not answer.
    """
    handle = await asyncio.to_thread(_handle_of, name)
    with translated_errors():
        return cast("ApplicationDescription", await handle.describe_application.remote())


def _handle_of(name: str) -> Handle:
    """Return a handle to the deployment that describes an application."""
    overview = _overview().get(name)
    for root in ROOTS:
        if overview is not None and root in overview.deployments:
            return serve.get_deployment_handle(root, name)
    names = ", ".join(_ours(None)) or "none"
    raise ModelNotFoundError(f"No application {name!r} of raystream runs here. Running: {names}.")


def find_application(model_id: str | None) -> str:
    """Return the name of the application that serves a model; it may take a while.

    Args:
        model_id: The model; None stands for any.

    Raises:
        ModelNotFoundError: None serves it, or several do and the caller's own does not.
        ReplicaUnavailableError: No Ray runs here.
    """
    names = _ours(model_id)
    with suppress(RayServeException):  # no replica asks
        own = serve.get_replica_context().app_name
        names = [own] if own in names else names
    if len(names) == 1:
        return names[0]
    if not names:
        what = "No application" if model_id is None else f"No application serves {model_id!r}"
        others = ", ".join(_ours(None)) or "none"
        raise ModelNotFoundError(f"{what} here. Running applications of raystream: {others}.")
    what = "models" if model_id is None else repr(model_id)
    raise ModelNotFoundError(
        f"Several applications serve {what}: {', '.join(names)}. Say which by "
        f"Model(..., application={names[0]!r})."
    )


def _ours(model_id: str | None) -> list[str]:
    """Return the names of the applications that serve a model; None stands for any."""
    wanted = None if model_id is None else deployment_name_of(model_id)
    return [
        name
        for name, each in _overview().items()
        if any(root in each.deployments for root in ROOTS)
        and (wanted is None or wanted in each.deployments)
    ]


def _overview() -> Mapping[str, ApplicationStatusOverview]:
    """Ask Serve's controller for the applications.

    Raises:
        ReplicaUnavailableError: No Ray runs here, or it can't be reached.
    """
    try:
        return serve.status().applications
    except RayError as error:
        raise ReplicaUnavailableError(f"Serve's controller does not answer: {error}") from error


def connect(
    server: str | int | None = None, *, environment: MutableMapping[str, str] | None = None
) -> None:
    """Join the cluster of a server of this user, or that of RAY_ADDRESS, or any Ray here.

    `Model` does so itself. A program that calls Serve's own functions calls this first: they would
    start another Ray, or look for a server that listens on this machine only where it is not. Of
    several servers, a program says here which it joins. If the program is already part of a
    cluster, this does nothing.

    Args:
        server: The server's port, or its URL, as `raystream status` shows it. None means the one
            of RAY_ADDRESS, or else this user's only one.
        environment: Names the cluster, and gets the token of the server; None means the process's
            own.

    Raises:
        ReplicaUnavailableError: There is none, or several servers.
    """
    with _connecting:
        if not ray.is_initialized():
            _join(server, os.environ if environment is None else environment)


def _join(server: str | int | None, environment: MutableMapping[str, str]) -> None:
    address = _server_address(server, environment) or AUTO
    if is_loopback(address.rpartition(":")[0]):
        # Such a Ray listens only there; by default, Ray looks for it at this machine's address in
        # the network, and waits for a minute.
        ray_constants.ENABLE_RAY_CLUSTER = False
    # Ray has read its variables when it was imported, which was before they named the token.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        ray.init(
            address=address, namespace="serve", log_to_driver=False, logging_level=logging.WARNING
        )
    except (ConnectionError, RuntimeError, RayError) as error:
        is_none = address == AUTO and not isinstance(error, RayError)  # such as a wrong token
        told = NO_SERVER if is_none else NOT_JOINED.format(address)
        raise ReplicaUnavailableError(told) from error


def _server_address(server: str | int | None, environment: MutableMapping[str, str]) -> str | None:
    """Return the address of the server that is joined, or else RAY_ADDRESS; note its token.

    Raises:
        ReplicaUnavailableError: There are several servers, or not the one that is named.
    """
    found = [each.record for each in own_servers(environment) if each.is_alive]
    running = [record for record in found if record.ray_address is not None]
    if server is not None:
        named = str(server).rstrip("/").replace("localhost", "127.0.0.1")
        servers = [each for each in running if named in (each.url, str(each.port))]
        if not servers:
            names = "; ".join(each.name for each in running) or "none"
            raise ReplicaUnavailableError(f"No server {server} of yours runs here, but: {names}.")
    else:
        given = environment.get(ADDRESS)
        servers = [each for each in running if not given or each.ray_address == given]
        if not servers:
            return given
    if len(servers) > 1:
        told = "; ".join(f"{ADDRESS}={each.ray_address} for {each.name}" for each in servers)
        raise ReplicaUnavailableError(
            f"Several servers run here. Call connect(PORT) first, or set one of: {told}."
        )
    if servers[0].token_file is not None:
        environment.setdefault(AUTH_MODE, "token")
        environment.setdefault(TOKEN_FILE, servers[0].token_file)
    return servers[0].ray_address


_applications: Final[dict[asyncio.AbstractEventLoop, Applications]] = {}


@asynccontextmanager
async def reaching(model_id: str | None, name: str | None) -> AsyncIterator[ApiContext]:
    """Reach the application that serves a model, for one request from the running event loop.

    Args:
        model_id: The model; None stands for any.
        name: The application; None looks for it.

    Raises:
        ModelNotFoundError: No application serves the model, or several do.
        RaystreamError: The application can't be reached.
    """
    connect()
    for loop in [each for each in list(_applications) if each.is_closed()]:
        _applications.pop(loop, None)
    ours = _applications.setdefault(asyncio.get_running_loop(), Applications())
    application = await ours.of(model_id, name)
    async with application.requested() as context:
        yield context
