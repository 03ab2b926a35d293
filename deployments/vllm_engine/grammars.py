"""Binds vLLM's texts by the embedded engine's grammars, also where a text was begun elsewhere.

vLLM compiles a grammar of its own kinds only, and from its beginning. So a request carries ours in
an envelope that passes vLLM's check, with the delivered tokens and the marks of reasoning, and the
scheduler's backend (`GrammarBackend`) opens it in EngineCore. The same matcher as in the embedded
engine then makes the masks.

What fails here ends its own request with finish reason `error`: a grammar that does not compile, by
vLLM itself, and a matcher that fails, by `scheduler`, without the token that it could not mask.

Source: vllm/v1/structured_output/backend_types.py and __init__.py of vLLM 0.32.
"""

import json
import logging
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

from deployments.contract.sampling_params import ReasoningTokens
from deployments.engine.grammar.matcher import BITS_PER_WORD, GrammarCompiler, TokenMatcher
from deployments.vllm_engine.moves import KEY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.config import ModelConfig

logger = logging.getLogger(__name__)

_SPACES = re.compile(r'(\\*")whitespace_pattern\1: ?\1\[ \]\?\1')
_SEPARATORS = r"\1item_separator\1: \1,[ ]?\1, \1key_separator\1: \1:[ ]?\1"
"""llguidance 1.7, which vLLM takes, repeats a pattern of white space for ever after a comma; 1.9
takes it once. So a space may follow a comma or a colon, and none a bracket.
"""

_ANY_TEXT = "start: /(.|\\n)*/\n"


def envelope(
    grammar: str | None, given: Sequence[int] = (), reasoning: ReasoningTokens | None = None
) -> str:
    """Return a text for `StructuredOutputsParams(grammar=...)` that carries one of our grammars.

    To vLLM it is a Lark grammar of any text, with a comment.

    Args:
        grammar: As llguidance serializes it; None binds only the length of the reasoning.
        given: The tokens of the text so far.
        reasoning: The marks of reasoning that may come before the grammar's text.
    """
    marks = None if reasoning is None else asdict(reasoning)
    bound = None if grammar is None else _SPACES.sub(_SEPARATORS, grammar)
    content = json.dumps({"grammar": bound, "given": list(given), "reasoning": marks})
    return f"// {KEY} {b64encode(zlib.compress(content.encode())).decode()}\n{_ANY_TEXT}"


def eos_token_ids(
    model_config: "ModelConfig", tokenizer: "PreTrainedTokenizerBase"
) -> frozenset[int]:
    """Return the tokens that end a text, as the embedded engine finds them."""
    named = (model_config.try_get_generation_config() or {}).get("eos_token_id")
    if named is None:
        named = tokenizer.eos_token_id
    if named is None:
        return frozenset()
    return frozenset(named if isinstance(named, list) else [named])


@dataclass  # Without it, the base's own __init__ would not call __post_init__.
class GrammarBackend(StructuredOutputBackend):
    """Compiles the grammars of all requests of an engine; `scheduler` sets it."""

    def __post_init__(self) -> None:
        """Prepare to compile."""
        self._eos_token_ids = eos_token_ids(self.vllm_config.model_config, self.tokenizer)
        self._compiler = GrammarCompiler(self.tokenizer, self.vocab_size, self._eos_token_ids)

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> "Grammar":
        """Open an envelope, and compile what it holds.

        Raises:
            InvalidParameterError: See `GrammarCompiler.compile`.
            ValueError: The text is no envelope.
        """
        slashes, key, content = grammar_spec.partition("\n")[0].split(" ")
        if (request_type, slashes, key) != (StructuredOutputOptions.GRAMMAR, "//", KEY):
            raise ValueError("the grammar comes in no envelope")
        held = json.loads(zlib.decompress(b64decode(content)))
        marks = held["reasoning"]
        reasoning = None if marks is None else ReasoningTokens(**marks)
        matcher = self._compiler.compile(held["grammar"], held["given"], reasoning)
        return Grammar(matcher, self._eos_token_ids)

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Return masks that allow all tokens: [max_num_seqs, words], int32, on the host."""
        num_words = -(-self.vocab_size // BITS_PER_WORD)
        return torch.full((max_num_seqs, num_words), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing: there is nothing to free."""


class Grammar(StructuredOutputGrammar):
    """The state of one request's grammar.

    No speculation: nothing is ever taken back.
    """

    def __init__(self, matcher: TokenMatcher, eos_token_ids: frozenset[int]) -> None:
        """Start where the matcher is."""
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_ahead = 0
        self._has_raised = False

    @property
    def has_failed(self) -> bool:
        """Whether the request can't go on."""
        return self._has_raised or self._matcher.error is not None

    def ends_with(self, tokens: list[int]) -> bool:
        """Consume the request's next tokens; return whether the grammar allows no more after them.

        vLLM itself would compute one more token then, the end of the text. It calls `accept_tokens`
        for the same tokens later.
        """
        self._num_ahead += len(tokens)
        have_ended = [self._advance(token_id) for token_id in tokens]
        return any(have_ended)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Consume the request's next tokens; return whether it can go on."""
        num_ahead = min(self._num_ahead, len(tokens))
        self._num_ahead -= num_ahead
        for token_id in tokens[num_ahead:]:
            self._advance(token_id)
        return not self.has_failed

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write the tokens that may come next into a row of [rows, words], int32."""
        row = bitmask[batch_index]
        try:
            row.copy_(self._matcher.bitmask()[: len(row)])
        except Exception:  # noqa: BLE001 - it would end all requests
            self._fail()
            row.fill_(-1)

    def is_terminated(self) -> bool:
        """Return False: `ends_with` and the stop tokens end the request."""
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Refuse speculation.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("speculation with a grammar")

    def rollback(self, num_tokens: int) -> None:
        """Refuse speculation.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("speculation with a grammar")

    def reset(self) -> Any:
        """Refuse: nothing in vLLM calls it.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError

    def _advance(self, token_id: int) -> bool:
        if token_id in self._eos_token_ids:
            return False  # a stop token, which has ended the request
        try:
            return self._matcher.advance(token_id)
        except Exception:  # noqa: BLE001 - it would end all requests
            self._fail()
            return False

    def _fail(self) -> None:
        if not self._has_raised:
            logger.exception("a grammar's matcher failed")
        self._has_raised = True
