"""The bodies that `/docs` suggests, one or two for each POST route.

Each succeeds as it stands, with any model of the route's task: `docs` puts a served model's id in
front. The first of a route is what "Try it out" opens with.
"""

from collections.abc import Mapping
from typing import Any, Final

_QUESTION: Final = [{"role": "user", "content": "What does os.path.join do?"}]
_BEGINNING: Final = "Return the number of"
_DOCUMENTATION: Final = (
    "Join one or more path segments intelligently. The return value is the concatenation of path "
    "and all members of *paths, with exactly one directory separator following each non-empty part."
)
_RANKING: Final = {
    "The best document": {
        "query": "How do I join two paths?",
        "documents": ["Return a new list.", _DOCUMENTATION],
        "top_n": 1,
    },
}
_SCORE: Final = {
    "One text with two": {
        "text_1": "How do I join two paths?",
        "text_2": ["Return a new list.", _DOCUMENTATION],
    },
}

EXAMPLES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "/v1/chat/completions": {
        "A stream": {"messages": _QUESTION, "max_tokens": 100, "stream": True},
        "A whole answer": {"messages": _QUESTION, "max_tokens": 100},
    },
    "/v1/completions": {
        "A stream": {"prompt": _BEGINNING, "max_tokens": 32, "stream": True},
        "Two prompts": {"prompt": [_BEGINNING, "Open a file and"], "max_tokens": 32},
    },
    "/v1/responses": {
        "A stream": {
            "input": "What does os.path.join do?",
            "max_output_tokens": 100,
            "stream": True,
        },
        "A whole answer": {"input": _QUESTION, "max_output_tokens": 100},
    },
    "/v1/messages": {
        "A stream": {"messages": _QUESTION, "max_tokens": 100, "stream": True},
        "A whole answer": {
            "system": "You explain Python.",
            "messages": _QUESTION,
            "max_tokens": 100,
        },
    },
    "/v1/messages/count_tokens": {
        "A question": {"messages": _QUESTION},
    },
    "/text-generation": {
        "A stream": {"prompt": _BEGINNING, "max_tokens": 32},
        "A whole answer": {"prompt": _BEGINNING, "max_tokens": 32, "stream": False},
    },
    "/tokenize": {
        "A prompt": {"prompt": _BEGINNING, "return_token_strs": True},
    },
    "/detokenize": {
        "Token ids": {"tokens": [40, 41, 42]},
    },
    "/v1/classify": {
        "Two texts": {"input": [_DOCUMENTATION, "Return a new list."]},
        "In pieces": {"input": _DOCUMENTATION, "split": {"max_chars": 100}},
    },
    "/classify": {
        "A text": {"input": _DOCUMENTATION},
    },
    "/v1/embeddings": {
        "Two texts": {"input": [_DOCUMENTATION, "Return a new list."]},
        "In base64": {"input": "What does os.path.join do?", "encoding_format": "base64"},
    },
    "/rerank": _RANKING,
    "/v1/rerank": _RANKING,
    "/v2/rerank": _RANKING,
    "/score": _SCORE,
    "/v1/score": _SCORE,
}
