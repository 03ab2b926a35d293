"""Reads the questions and images of a run and checks them before the first request is sent."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtest.client.contract import Call, UnsuitableCallError
from loadtest.config.choices import GpuSampling
from loadtest.config.run_config import RunConfig
from loadtest.load.api import build_api
from loadtest.load.gpu_monitor import has_nvidia_smi
from loadtest.load.questions import SHIPPED, Question, read_questions

MEDIA_TYPES: Final = {
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
}


class ImagesError(ValueError):
    """A directory holds no images; the message names it."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The questions, and the images as `data:` URIs."""

    questions: tuple[Question, ...]
    image_urls: tuple[str, ...]


def read_inputs(config: RunConfig) -> Inputs:
    """Read the questions and images, and check that the API accepts them.

    Raises:
        ValueError: There are none, the API does not accept them, or `--gpu on` has no nvidia-smi.
    """
    if config.gpu is GpuSampling.ON and not has_nvidia_smi():
        raise ValueError("--gpu on needs nvidia-smi, which is not installed; use --gpu auto")
    source = config.data or SHIPPED
    questions = read_questions(source)
    image_urls = read_images(config.images) if config.images is not None else ()
    api = build_api(config, model=None)
    image_url = image_urls[0] if image_urls else None
    for number, question in enumerate(questions, 1):
        try:
            api.body(Call(question.text, question.messages, image_url))
        except UnsuitableCallError as error:
            raise ValueError(f"question {number} of {source}: {error}") from None
    return Inputs(questions, image_urls)


def read_images(directory: Path) -> tuple[str, ...]:
    """Return a directory's images as `data:` URIs, sorted by file name.

    All are read before the load begins, since reading files during a run would delay its requests.

    Raises:
        ImagesError: There are none.
        OSError: An image can't be read.
    """
    if not directory.is_dir():
        raise ImagesError(f"{directory} is not a directory")
    paths = sorted(path for path in directory.iterdir() if path.suffix.lower() in MEDIA_TYPES)
    if not paths:
        raise ImagesError(f"{directory} holds no files of type {', '.join(sorted(MEDIA_TYPES))}")
    return tuple(_data_uri(path) for path in paths)


def _data_uri(path: Path) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"data:{MEDIA_TYPES[path.suffix.lower()]};base64,{encoded}"
