"""`POST /tokenize` and `POST /detokenize`: access to a replica's tokenizer."""

from fastapi import APIRouter

from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.open_answer import tokenize
from serve_app.api.tokenize.schema import DetokenizeBody, Detokenized, TokenizeBody, Tokens
from serve_app.backends.replicas.backend import DetokenizeRequest
from serve_app.http.json_route import JsonRoute


class TokenizeApi:
    """Turns prompts into token ids, and token ids into text."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["tokens"])
        router.add_api_route(
            "/tokenize",
            self.tokenize,
            methods=["POST"],
            summary="Tokenize a prompt",
        )
        router.add_api_route(
            "/detokenize",
            self.detokenize,
            methods=["POST"],
            summary="Turn token ids into text",
        )
        return router

    async def tokenize(self, body: TokenizeBody) -> Tokens:
        """Return the token ids that the model would read for a prompt; nothing is generated."""
        model = await self._context.models.find(body.model)
        found = await tokenize(
            self._context,
            body,
            model,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt is not False,
            with_strings=body.return_token_strs is True,
        )
        return Tokens(
            count=len(found.token_ids),
            max_model_len=model.description.max_model_len,
            tokens=list(found.token_ids),
            token_strs=None if found.strings is None else list(found.strings),
        )

    async def detokenize(self, body: DetokenizeBody) -> Detokenized:
        """Return the text of token ids, special tokens by their names."""
        model = await self._context.models.find(body.model)
        return Detokenized(prompt=await model.backend.send(DetokenizeRequest(tuple(body.tokens))))
