"""`POST /tokenize` and `POST /detokenize`: access to a replica's tokenizer."""

from typing import TYPE_CHECKING

from fastapi import APIRouter

from deployments.contract.generation import TokenizeRequest
from serve_app.api.body.limits import check_prompts
from serve_app.api.intake.context import ApiContext
from serve_app.api.openai.template_schema import as_pairs
from serve_app.api.tokenize.schema import DetokenizeBody, Detokenized, TokenizeBody, Tokens
from serve_app.api.tools.schema import to_offer
from serve_app.backends.models.catalog import ServedModel
from serve_app.http.json_route import JsonRoute

if TYPE_CHECKING:
    from deployments.contract.messages import ChatMessage


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
        found = await model.backend.tokenize(await self._request(body, model))
        return Tokens(
            count=len(found.token_ids),
            max_model_len=model.description.max_model_len,
            tokens=list(found.token_ids),
            token_strs=None if found.strings is None else list(found.strings),
        )

    async def detokenize(self, body: DetokenizeBody) -> Detokenized:
        """Return the text of token ids, special tokens by their names."""
        model = await self._context.models.find(body.model)
        return Detokenized(prompt=await model.backend.detokenize(tuple(body.tokens)))

    async def _request(self, body: TokenizeBody, model: ServedModel) -> TokenizeRequest:
        limits = self._context.limits
        offer = to_offer(body.tools, None, None, limits, model.description)
        prompt: str | tuple[ChatMessage, ...]
        if body.prompt is None:
            prompt = await self._context.prompts.read(body.messages or [], model)
        else:
            prompt = body.prompt
        check_prompts([prompt], limits)
        return TokenizeRequest(
            prompt,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt is not False,
            with_strings=body.return_token_strs is True,
            tools=offer.tools,
            template_kwargs=as_pairs(body.chat_template_kwargs, body.messages),
        )
