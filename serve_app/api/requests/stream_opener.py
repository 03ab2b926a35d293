"""Opens the streams of a request's answers, with the sampling that its fields ask for.

Limits are checked first, then JSON schemas are compiled, and only then is a replica asked.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar, TypeVarTuple

from deployments.contract.bounded_executor import BoundedExecutor
from deployments.contract.descriptions import ReasoningDescription
from deployments.contract.errors import InvalidRequestError
from deployments.contract.gen_ai_spans import operation_of
from deployments.contract.generation import GenerationRequest
from deployments.contract.sampling_params import SamplingParams
from serve_app.api.body.limits import Prompt, check_num_choices, check_prompts, check_stops
from serve_app.api.generation_body import GenerationBody
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.channel_grammar import after_reasoning
from serve_app.api.tools.hosted import left_out_warnings
from serve_app.api.tools.offer import ToolOffer
from serve_app.backends.models.catalog import ServedModel
from serve_app.backends.streams.choices import Choices
from serve_app.backends.streams.deadlines import arrival_s, first_deadline
from serve_app.http.request_record import (
    claim_of_request,
    note_operation,
    note_prompt,
    note_warnings,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_NAME_LENGTH: Final = 64

UNHELD_BUDGET: Final = (
    "Not enforced: thinking.budget_tokens, because a grammar binds this answer's channels"
)

_FORMAT: Final = re.compile(r"Unknown format: (?P<name>.*)", re.DOTALL)
_KEYWORDS: Final = re.compile(r"Unimplemented keys: (?P<names>\[.*\])", re.DOTALL)
_ONE_OF: Final = "oneOf not fully supported"
_SIZES: Final = "min/maxProperties only supported"


@dataclass(frozen=True, slots=True)
class Continuation:
    """What is known of an answer that is not begun here for the first time.

    Attributes:
        seed: What its tokens are drawn with.
        token_ids: Those that it has so far.
        fingerprint: The version of the model that they come from; None if there are none.
    """

    seed: int
    token_ids: tuple[int, ...] = ()
    fingerprint: str | None = None

    def of(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request for the rest of the answer."""
        return replace(
            request,
            generated_token_ids=self.token_ids,
            is_resumed=True,
            fingerprint=self.fingerprint,
        )


class StreamOpener:
    """Opens the streams of answers."""

    def __init__(self, grammars: GrammarSettings, schemas: BoundedExecutor) -> None:
        self._limits = grammars.limits
        self._grammars = grammars
        self._schemas = schemas

    async def open(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        body: GenerationBody,
        offer: ToolOffer,
        request_id: str,
        continuation: Continuation | None = None,
    ) -> Choices:
        """Open a stream for each answer to each prompt.

        Where the surface separates reasoning, answers may reason before the text that a grammar
        binds. With a continuation, the only answer goes on behind it.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        claim = claim_of_request(body.asked_priority)
        template_kwargs = body.to_template_kwargs(model.description)
        check_prompts(prompts, self._limits)
        check_num_choices(body.num_choices, self._limits)
        sampling = await self._to_sampling(body, model, offer)
        if body.separates_reasoning and model.description.reasoning is not None:
            reasoning = model.description.reasoning
            sampling = _with_reasoning(sampling, reasoning, body.max_reasoning_tokens)
        if continuation is not None:
            sampling = replace(sampling, seed=continuation.seed)
        trace = note_operation(operation_of(prompts[0]))
        requests = [
            GenerationRequest(
                request_id,
                prompt,
                sampling.of_choice(index),
                tools=offer.tools,
                default_max_tokens=body.default_max_tokens,
                # A length that is too long is lowered, or the error names its field.
                length_param=None if self._limits.clamp_max_tokens else body.length_param,
                template_kwargs=template_kwargs,
                trace=trace,
                claim=claim,
            )
            for prompt in prompts
            for index in range(body.num_choices)
        ]
        if continuation is not None and continuation.token_ids:
            requests = [continuation.of(request) for request in requests]
        choices = await Choices.of(model.backend, requests, len(prompts))
        note_prompt(choices.num_prompt_tokens)
        return choices

    async def _to_sampling(
        self, body: GenerationBody, model: ServedModel, offer: ToolOffer
    ) -> SamplingParams:
        """Return the engine's parameters, with the grammar of the text and of tool calls.

        Raises:
            InvalidRequestError: A field can't be honoured.
            OverloadedError: Too many schemas wait to be compiled.
        """
        sampling = body.to_sampling(model.description.default_sampling)
        check_stops(sampling.stop, self._limits, body.stop_param)
        if offer.must_call and body.constraining_field is not None:
            raise InvalidRequestError(
                f"{body.constraining_field} constrains the answer's text, but tool_choice makes "
                "the answer a call. Leave one of the two out.",
                body.constraining_field,
            )
        unheld: tuple[str, ...] = ()
        if (make := body.grammar_maker()) is not None:
            grammar = await self._compile(make, self._grammars)
            if grammar is not None:
                sampling, unheld = replace(sampling, grammar=grammar.text), grammar.unheld
        reasoning = model.description.reasoning
        has_channels = reasoning is not None and reasoning.tokens.channel is not None
        if sampling.grammar and has_channels and body.separates_reasoning and not offer.format:
            marks = dict(model.description.tool_call_token_ids)
            field = body.constraining_field or body.format_param
            sampling = replace(sampling, grammar=after_reasoning(sampling.grammar, marks, field))
        if offer.is_guiding(sampling):
            field = body.constraining_field or body.format_param
            guided = await self._compile(offer.guide, sampling, self._grammars, field)
            sampling, unheld = guided.sampling, (*unheld, *guided.unheld)
        note_warnings((*unheld_warnings(unheld), *left_out_warnings(offer.left_out)))
        return sampling

    async def _compile(self, make: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a call that compiles JSON schemas on a thread, and return its result.

        Raises:
            OverloadedError: Too many schemas wait to be compiled.
            DeadlineExceededError: It took longer than the first token may take.
        """
        work = self._schemas.run(make, *args)
        return await first_deadline(self._limits, arrival_s()).hold(work)


def _with_reasoning(
    sampling: SamplingParams, reasoning: ReasoningDescription, max_tokens: int | None
) -> SamplingParams:
    """Return parameters that keep the marks in the text, and the reasoning out of a grammar.

    Args:
        sampling: The parameters.
        reasoning: How the model marks its reasoning.
        max_tokens: Most tokens of the reasoning; None sets no limit.
    """
    if reasoning.is_special:
        sampling = replace(sampling, skip_special_tokens=False)
    if sampling.grammar is None and max_tokens is None:
        return sampling
    if sampling.grammar is not None and reasoning.tokens.channel is not None:
        # The grammar holds the reasoning: it counts no tokens, and no other mask joins its own.
        if max_tokens is not None:
            note_warnings((UNHELD_BUDGET,))
        return sampling
    return replace(sampling, reasoning=replace(reasoning.tokens, max_tokens=max_tokens))


def unheld_warnings(unheld: Iterable[str]) -> tuple[str, ...]:
    """Return the warning about what a grammar leaves out of its schemas; nothing without any.

    Args:
        unheld: llguidance's warnings, or what `SchemaHolder` names.
    """
    named = sorted({name for warning in unheld for name in _names(warning)})
    return (f"Not enforced in JSON schemas: {', '.join(named)}",) if named else ()


def _names(warning: str) -> list[str]:
    """Return the keywords that a warning is about, in a client's words."""
    if found := _FORMAT.fullmatch(warning):
        return [f"format {found['name'][:MAX_NAME_LENGTH]}"]
    if found := _KEYWORDS.fullmatch(warning):
        names: list[str] = json.loads(found["names"])
        return [name[:MAX_NAME_LENGTH] for name in names]
    if warning.startswith(_ONE_OF):
        return ["oneOf (read as anyOf)"]
    if warning.startswith(_SIZES):
        return ["minProperties and maxProperties"]
    return [warning[:MAX_NAME_LENGTH]]
