"""An application of somebody else's: its deployment asks a model of the application beside it."""

from collections.abc import AsyncIterator

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from raystream import Model


class Story:
    """Streams what the model says, as plain text."""

    def __init__(self) -> None:
        self._model = Model("pydoc-chat")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Answer the question in the query."""
        return StreamingResponse(self._told(request.query_params["question"]))

    async def _told(self, question: str) -> AsyncIterator[str]:
        options = {"temperature": 1.3, "seed": 15, "max_tokens": 200, "min_tokens": 200}
        async for delta in self._model.chat(question, **options):
            yield delta.text


app = serve.deployment(ray_actor_options={"num_cpus": 0.05})(Story).bind()
