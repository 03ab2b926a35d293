"""Makes the API that a configuration asks for."""

from loadtest.apis.by_path import ApiName
from loadtest.apis.classify import Classify
from loadtest.apis.contract import Api, BodySettings
from loadtest.apis.custom import Custom
from loadtest.apis.openai import OpenAiChat, OpenAiCompletions
from loadtest.apis.text_generation import TextGeneration
from loadtest.config import RunConfig


def build_api(config: RunConfig, model: str | None) -> Api:
    """Return the API, with the model to ask for.

    Raises:
        ValueError: A custom API's path to the text is none.
    """
    settings = BodySettings(model, config.max_tokens, config.temperature)
    extra = config.body or {}
    match config.resolved_api():
        case ApiName.OPENAI_COMPLETIONS:
            return OpenAiCompletions(settings, extra)
        case ApiName.TEXT_GENERATION:
            return TextGeneration(settings, extra)
        case ApiName.CLASSIFY:
            return Classify(settings, extra)
        case ApiName.CUSTOM:
            return Custom(extra, config.text_path, config.done)
        case _:
            return OpenAiChat(settings, extra)
