"""The prompts that sentence-transformers' files put before a text.

Source: sentence-transformers 6.2, sentence_transformer/model.py, encode_query, encode_document
"""

from deployments.contract.descriptions import EmbeddingDescription
from deployments.contract.errors import InvalidRequestError


def named_prompt(vectors: EmbeddingDescription, name: str | None) -> str:
    """Return the prompt of this name; None means the model's default.

    Raises:
        InvalidRequestError: The model has no prompt of this name.
    """
    prompts = dict(vectors.prompts)
    if name is None:
        return prompts.get(vectors.default_prompt or "", "")
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InvalidRequestError(
            f"The model has no prompt {name!r}; its prompts: {known}.", "prompt_name"
        )
    return prompts[name]


def role_prompts(vectors: EmbeddingDescription) -> tuple[str, str]:
    """Return the prompts of queries and of documents; empty if the model has none for them."""
    prompts = dict(vectors.prompts)
    return prompts.get("query", ""), prompts.get("document", "")
