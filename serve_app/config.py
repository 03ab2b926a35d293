"""The configuration that stands under `args:` in serve_config.yaml.

One way in: every limit has its owner here, every unknown key is refused with the nearest known one
named. Ray's own sections of the file are checked by `serve_app.check`.
"""

from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

INGRESS_NAME = "Ingress"
"""The ingress's deployment in Ray."""

MAX_NUM_TOOLS = 1024
"""What `max_num_tools` may be at most: longer lists are not even looked at."""


def unknown_key_message(key: str, known: list[str]) -> str:
    """Return a sentence that names the unknown key and, if one is near, the key that was meant."""
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r}: {hint}"


class StrictModel(BaseModel):
    """A section of the configuration; unknown keys are errors with a hint."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = list(cls.model_fields)
            unknown = [str(key) for key in data if key not in known]
            if unknown:
                raise ValueError("; ".join(unknown_key_message(key, known) for key in unknown))
        return data


class ModelConfig(StrictModel):
    """One model: where it comes from, where it runs and how much it may hold.

    Attributes:
        id: The name that clients ask for. It names the Serve deployment too.
        source: A local folder, or the id of a hub repository.
        revision: A commit of the hub repository; None means its newest.
        task: What the model does.
        dtype: The weights' type on the device; auto keeps what the files have, except that a CPU
            without bfloat16 arithmetic gets float32.
        quantization: int8 holds the linear layers of the language model in half of bfloat16's
            bytes, on a CPU alone: decoding is faster, and texts differ a little from those of the
            weights as they are.
        device: auto takes the GPU that Ray assigned, else the CPU.
        num_gpus: What Ray reserves; auto means `gpu_share` where the cluster has GPUs, else 0;
            a number is 0, or a share of one GPU.
        gpu_share: The part of a GPU that auto asks for.
        num_cpus: CPUs that Ray reserves for each replica.
        num_threads: Threads that a CPU model computes with; auto chooses by the model's size (see
            `deployments.gpu.device.num_compute_threads`).
        max_model_len: Tokens of prompt and answer together.
        max_num_seqs: Sequences that run at once; each holds a KV slot.
        max_batched_tokens: Tokens in one engine step.
        prefix_caching: Whether prompts that begin alike (a system prompt, the turns before) are
            computed once. The cache is shared by all clients, so one can tell by the time of its
            first token whether somebody's prompt began like its own; false closes that.
        cuda_graphs: Whether decode steps on a GPU are captured and launched as a whole, which takes
            some memory; false launches them kernel by kernel. A CPU knows no such thing.
        tool_call_parser: How the model writes the calls of tools: auto asks its chat template, none
            refuses tools; the names are vLLM's.
    """

    id: str = Field(min_length=1, max_length=96, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    source: str = Field(min_length=1)
    revision: str | None = None
    task: Literal["generate", "classify"] = "generate"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_gpus: Literal["auto"] | float = "auto"
    gpu_share: float = Field(default=1.0, gt=0, le=1)
    num_cpus: float = Field(default=1, ge=0)
    num_threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    max_model_len: int = Field(default=4096, ge=2)
    max_num_seqs: int = Field(default=32, ge=1)
    max_batched_tokens: int = Field(default=2048, ge=1)
    prefix_caching: bool = True
    cuda_graphs: bool = True
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.num_gpus != "auto" and not 0 <= self.num_gpus <= 1:
            raise ValueError("num_gpus must be 'auto', or from 0 to 1: a replica runs on one GPU")
        if self.task != "generate":
            raise ValueError(f"task {self.task!r} is not served yet; use 'generate'")
        if self.quantization is not None and self._runs_on_gpu:
            raise ValueError(
                f"quantization {self.quantization!r} runs on a CPU alone; write `device: cpu` "
                "and `num_gpus: 0`, or `quantization: null`"
            )
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence needs one token in every step"
            )
        return self

    @property
    def _runs_on_gpu(self) -> bool:
        """Whether a GPU is asked for by name; `auto` alone may find one or not."""
        has_share = self.num_gpus != "auto" and self.num_gpus > 0
        return self.device == "cuda" or (self.device == "auto" and has_share)

    @property
    def deployment_name(self) -> str:
        """The model's deployment in Ray; Ray's file names allow no slash."""
        return self.id.replace("/", "--")


class LimitsConfig(StrictModel):
    """What one request may ask for.

    Attributes:
        max_body_bytes: Size of a request's body.
        max_num_images: Images in one request.
        max_image_pixels: Pixels of one image, checked before it is decoded.
        max_num_tools: Tools that one request may offer to the model.
        max_tools_bytes: Size of all their names, descriptions and schemas together, as JSON.
        max_schema_bytes: Size of one JSON schema that an answer must be valid by.
        max_schema_depth: How deeply its brackets may be nested.
        max_schema_compile_s: Seconds of CPU that it may take to compile.
        max_num_prompts: Texts that one completions request may ask for: its prompts, each `n`
            times. Each is a sequence of its own.
    """

    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    max_num_images: int = Field(default=8, ge=0)
    max_image_pixels: int = Field(default=16 * 2**20, ge=1)
    max_num_tools: int = Field(default=128, ge=0, le=MAX_NUM_TOOLS)
    max_tools_bytes: int = Field(default=64 * 2**10, ge=0)
    max_schema_bytes: int = Field(default=2**16, ge=2, le=2**19)
    max_schema_depth: int = Field(default=64, ge=1, le=100)
    max_schema_compile_s: int = Field(default=1, ge=1, le=60)
    max_num_prompts: int = Field(default=64, ge=1)


class AppConfig(StrictModel):
    """Everything that the composition root needs."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        names = [model.deployment_name for model in self.models]
        if INGRESS_NAME in names:
            raise ValueError(f"model ids must differ: {INGRESS_NAME!r} is the ingress's own name")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"model ids must differ; used twice: {', '.join(twice)}")
        return self
