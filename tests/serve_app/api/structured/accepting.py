"""Asks a grammar whether it accepts a text."""

from llguidance import LLMatcher, LLTokenizer


def takes(grammar: str, text: str) -> bool:
    """Return whether the grammar accepts the text as complete."""
    vocabulary = LLTokenizer("byte")
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
