"""What compiling a grammar and following it may cost.

The numbers are counts of llguidance's own work, not times, so that a grammar which one machine
takes is taken by every other. They bound most of what hurts; the rest must be bounded in what a
grammar is made from.
"""

from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """Return the bounds for one grammar.

    A lexer's state takes 1 to 2 kB, so a sequence's parser stays below about 40 MB. Of the two
    `step` limits, a mask takes at most about 15 ms, and by far most take less than 0.1 ms. Errors
    must not repeat what a client sent, since they are logged.

    Source: the docstrings of `llguidance.LLParserLimits` tell what each unit costs.
    """
    return LLParserLimits(
        max_items_in_row=4_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
