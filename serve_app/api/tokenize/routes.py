"""`POST /tokenize` and `POST /detokenize`: the replica's own tokenizer, from outside."""

from fastapi import APIRouter

from deployments.contract import ChatMessage, TokenizeRequest
from serve_app.api.context import ApiContext
from serve_app.api.json_route import JsonRoute
from serve_app.api.openapi import ANSWER_ERRORS, errors
from serve_app.api.request_limits import check_prompts
from serve_app.api.tokenize_schema import DetokenizeBody, Detokenized, TokenizeBody, Tokens
from serve_app.api.tool_schema import to_offer
from serve_app.catalog import ServedModel


class TokenizeApi:
    """Turns prompts into tokens and tokens into text."""

    def __init__(self, context: ApiContext) -> None:
        """Keep what every surface is given."""
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["tokens"])
        router.add_api_route(
            "/tokenize",
            self.tokenize,
            methods=["POST"],
            summary="Tell the tokens of a prompt",
            responses=errors(*ANSWER_ERRORS),
        )
        router.add_api_route(
            "/detokenize",
            self.detokenize,
            methods=["POST"],
            summary="Tell the text of tokens",
            responses=errors(*ANSWER_ERRORS),
        )
        return router

    async def tokenize(self, body: TokenizeBody) -> Tokens:
        """Tell the tokens that a prompt is to the model; nothing is generated."""
        model = await self._context.find_model(body.model)
        found = await model.backend.tokenize(await self._request(body, model))
        return Tokens(
            count=len(found.token_ids),
            max_model_len=model.description.max_model_len,
            tokens=list(found.token_ids),
            token_strs=None if found.strings is None else list(found.strings),
        )

    async def detokenize(self, body: DetokenizeBody) -> Detokenized:
        """Tell the text of tokens, with the names of special ones."""
        model = await self._context.find_model(body.model)
        return Detokenized(prompt=await model.backend.detokenize(tuple(body.tokens)))

    async def _request(self, body: TokenizeBody, model: ServedModel) -> TokenizeRequest:
        limits = self._context.limits
        offer = to_offer(body.tools, None, None, limits, model.description)
        prompt: str | tuple[ChatMessage, ...]
        if body.prompt is None:
            prompt = await self._context.to_messages(body.messages or [], model)
        else:
            prompt = body.prompt
        check_prompts([prompt], limits)
        return TokenizeRequest(
            prompt,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt is not False,
            with_strings=body.return_token_strs is True,
            tools=offer.tools,
        )
