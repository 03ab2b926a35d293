"""Limits on the cost of compiling and following a grammar.

The numbers count llguidance's own units of work, not time, so that all machines accept the same
grammars. They bound most of the cost; the rest must be bounded in the grammar's source.
"""

from typing import Final

from llguidance import LLParserLimits

CLIENT_RULES: Final = "client_rules"
"""How the names of rules begin, within a serialized grammar, that a client has shaped."""

MAX_ITEMS: Final = 4_000
"""Most parser items after one byte. An optional property of a JSON object takes two or three."""

MAX_ITEMS_OF_CLIENT_RULES: Final = 1_000
"""The same for rules of clients, and for structural tags. These may be ambiguous, and then a byte
takes time that grows with the square of the items: 4,000 take over a second, during which no other
sequence continues."""


def parser_limits(grammar: str) -> LLParserLimits:
    """Return the limits for one grammar.

    A lexer state takes 1 to 2 kB, so a sequence's parser stays below about 40 MB. With the two
    `step` limits, a mask takes at most about 15 ms; most take less than 0.1 ms. Errors must not
    repeat what a client sent, since they are logged.

    Args:
        grammar: As llguidance serializes it.

    Source: the docstrings of `llguidance.LLParserLimits` say what each unit costs.
    """
    # Inside a client's text, quotes are escaped, so it can't hold these words.
    has_client_rules = f'"name": "{CLIENT_RULES}' in grammar
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_OF_CLIENT_RULES if has_client_rules else MAX_ITEMS,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
