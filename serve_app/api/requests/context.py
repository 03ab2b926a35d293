"""The objects that every surface is built on."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from deployments.contract.bounded_executor import BoundedExecutor
from deployments.contract.telemetry.metric_store import MetricStore
from serve_app.api.requests.model_lookup import ModelLookup
from serve_app.api.requests.prompt_reader import PromptReader
from serve_app.api.requests.stream_opener import StreamOpener
from serve_app.api.structured.answer_grammar import GrammarSettings, schema_executor
from serve_app.backends.models.catalog import ModelCatalog
from serve_app.backends.models.devices import Devices, DeviceSources
from serve_app.backends.models.operator_actions import OperatorActions
from serve_app.backends.models.serving_states import ServingStates
from serve_app.backends.models.snapshots import Snapshots
from serve_app.clock import Clock
from serve_app.config import LimitsConfig, StructuredOutputsConfig
from serve_app.images.fetcher import ImageSource
from serve_app.jobs.jobs import Jobs
from serve_app.keys.access import OperatorAccess
from serve_app.streaming.event_stream import EventStreamResponse
from serve_app.streaming.late_stream import begun

AnswerT = TypeVar("AnswerT")


class ApiContext:
    """The objects that a surface needs to answer requests.

    Attributes:
        catalog: All models that are served.
        limits: The bounds on one request.
        clock: Gives an answer's creation time and times its tokens.
        devices: Knows the memory and the replicas of the models.
        operators: Decides who may use an operator's routes.
        actions: What operators may do to models.
        snapshots: The metrics of all processes.
        jobs: Files and batches; None if none are kept.
        models: Finds the model that a request names.
        prompts: Reads the messages of a request.
        streams: Opens the streams of a request's answers.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        limits: LimitsConfig,
        clock: Clock,
        images: ImageSource | None = None,
        schemas: BoundedExecutor | None = None,
        structured_outputs: StructuredOutputsConfig | None = None,
        devices: Devices | None = None,
        operators: OperatorAccess | None = None,
        actions: OperatorActions | None = None,
        snapshots: Snapshots | None = None,
        jobs: Jobs | None = None,
    ) -> None:
        """Build the reader and the opener with one set of limits.

        Args:
            catalog: All models that are served.
            limits: The bounds on one request.
            clock: Gives an answer's creation time and times its tokens.
            images: Fetches images at https: URLs; without it such images are refused.
            schemas: Compiles JSON schemas; None makes an executor with its own threads.
            structured_outputs: How schemas are read; None means the defaults.
            devices: Knows the memory and the replicas of the models; None knows of no model.
            operators: Decides who may use an operator's routes; None asks for a key with the scope.
            actions: What operators may do to models; None knows of no model.
            snapshots: The metrics of all processes; None means that there are none.
            jobs: Files and batches; None if none are kept.
        """
        self.catalog = catalog
        self.limits = limits
        self.clock = clock
        self.devices = devices or Devices((), ServingStates(), DeviceSources())
        self.operators = operators or OperatorAccess()
        self.actions = actions or OperatorActions((), catalog, ServingStates())
        self.snapshots = snapshots or Snapshots(MetricStore(()).snapshot)
        self.jobs = jobs
        self.models = ModelLookup(catalog)
        self.prompts = PromptReader(limits, images)
        structured = structured_outputs or StructuredOutputsConfig()
        grammars = GrammarSettings(limits, structured.closed_objects)
        self.streams = StreamOpener(grammars, schemas or schema_executor())

    def answer(
        self,
        model_id: str | None,
        answering: Callable[[], Awaitable[AnswerT | EventStreamResponse]],
        *,
        streams: bool,
    ) -> Awaitable[AnswerT | EventStreamResponse]:
        """Return the answer to a request, to await.

        Args:
            model_id: The model that it names.
            answering: Makes the answer.
            streams: Whether that is a stream; one from a model that loads or wakes begins before.

        Raises:
            RaystreamError: The request was refused, or could not be answered.
        """
        if streams and self.catalog.may_wait(model_id):
            return begun(answering, self.clock.sleep)
        return answering()  # a plain function: each message of an answer resumes its awaiters
