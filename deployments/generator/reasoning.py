"""How a replica's model marks its reasoning, by configuration, template and tokenizer."""

from transformers import PreTrainedTokenizerBase

from deployments.compute.tokenizer_files import special_tokens
from deployments.contract.descriptions import ReasoningDescription
from deployments.contract.formats.reasoning_format import REASONING_FORMATS, ReasoningFormat
from deployments.contract.sampling_params import ReasoningTokens
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.generator.chat_template import ChatTemplate


def choose_reasoning_format(
    parser: str, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase
) -> ReasoningFormat | None:
    """Return how the model marks its reasoning; None if it is not separated from the answer.

    Args:
        parser: auto asks the template; none separates nothing; otherwise the name of a format.
        template: The model's template.
        tokenizer: The model's tokenizer, to which each mark must be one token.

    Raises:
        UnsupportedModelError: The configuration names a format whose marks are not one token each.
    """
    known = REASONING_FORMATS.get(parser)
    found = template.find_reasoning_format() if parser == "auto" else known
    if found is None or all(_is_one_token(mark, tokenizer) for mark in found.marks):
        return found
    if known is None:
        return None
    marks = " and ".join(map(repr, found.marks))
    raise UnsupportedModelError(
        f"reasoning_parser is {parser!r}, but {marks} are not tokens of the model's tokenizer; "
        "write `reasoning_parser: none`"
    )


def describe_reasoning(
    tokenizer: PreTrainedTokenizerBase, known: ReasoningFormat | None
) -> ReasoningDescription | None:
    """Return a format with the ids of its marks in a tokenizer."""
    if known is None:
        return None
    start, end, *others = (_token_id(mark, tokenizer) for mark in known.marks)
    tokens = ReasoningTokens(start, end, channel=next(iter(others), None))
    is_special = not special_tokens(tokenizer).isdisjoint((known.start, known.end))
    return ReasoningDescription(known.name, tokens, is_special)


def _token_id(mark: str, tokenizer: PreTrainedTokenizerBase) -> int:
    found = tokenizer.convert_tokens_to_ids(mark)
    assert isinstance(found, int), "one token has one id"
    return found


def _is_one_token(mark: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    return [mark] == tokenizer.tokenize(mark) and mark in tokenizer.get_vocab()
