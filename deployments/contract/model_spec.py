"""A model's entry in the configuration file, and the spec that its replicas are created with.

The entry is the only list of a model's keys. It travels whole; a spec adds what depends on the
cluster. Pydantic checks it, so the engine and the poolers know neither entry nor spec: they take
single values.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from deployments.contract.claims import PRIORITY_AGING_S
from deployments.contract.descriptions import Engine, Task
from deployments.contract.strict_model import StrictModel
from deployments.contract.telemetry.tracing import TracingSettings
from deployments.contract.vllm_args import ENTRY_KEYS, VllmArgs

T = TypeVar("T")

RAYS_UNITS: Final = 10_000
"""Of a core or a GPU; Ray counts no smaller part."""

TOLERANCE: Final = 1e-6
"""Ray counts in ten-thousandths; sums of fractions are off by less than this."""

MAX_AUTO_SEQS: Final = 256
"""The most sequences that run at once if a replica may choose; vLLM's default is the same."""

ONGOING_MARGIN = 64
"""Calls to a model's replica beyond those it admits: probes, and requests about to be refused."""

DEEP_SLEEP_AFTER_S: Final = 900.0
"""A process that sleeps costs memory and its reserved cores, and saves a start of some seconds."""

MIN_AUTO_SLEEP_S: Final = 5.0
"""The least that `light_sleep_after_s: auto` is: for as long a model counts as used."""

Auto = Literal["auto"]
"""The value of a setting that is chosen at the start."""


def number(value: Auto | T) -> T | None:
    """Return a setting's number; None if it is chosen at the start."""
    return None if value == "auto" else value


def deployment_name_of(model_id: str) -> str:
    """Return the name of a model's deployment in Ray, whose file names allow no slash."""
    return model_id.replace("/", "--")


GENERATION_KEYS = (
    "quantization",
    "max_num_seqs",
    "max_stall_ms",
    "kv_cache_memory_bytes",
    "prefix_caching",
    "cuda_graphs",
    "tool_call_parser",
    "reasoning_parser",
)
"""Keys of a model's entry that are refused unless it generates."""

ServerUrl = Annotated[str, Field(pattern=r"^https?://[^/?#\s@]+/?$")]
"""Where a server listens."""

VLLM_KEYS: Final = ("engine_python", "engine_urls", "engine_args", "exact", "adapters")
"""Keys of a model's entry that are refused unless vLLM runs it."""

NOT_OF_FLEETS: Final = (
    "engine_python",
    "engine_args",
    "exact",
    "adapters",
    "device",
    "num_gpus",
    "gpu_share",
    "num_threads",
    "dtype",
    "max_batched_tokens",
    "kv_cache_memory_bytes",
    "prefix_caching",
)
"""Keys of a model's entry that are refused where its servers run already."""

NOT_OF_VLLM: Final[Mapping[str, str]] = {
    "quantization": "vLLM finds AWQ, GPTQ and FP8 weights in the model's files, and `engine_args: "
    "{quantization: fp8}` quantizes others",
    "max_stall_ms": "write a smaller `max_batched_tokens`",
    "cuda_graphs": "write `engine_args: {enforce_eager: true}`",
}
"""Keys of a model's entry that only raystream's own engine has, and what to write for vLLM."""

NO_VLLM_SLEEP_ON_CPU: Final = (
    "light_sleep_after_s: vLLM gives no memory back on a CPU; leave it out, or leave "
    "`engine: vllm` out"
)
"""Why vLLM's models on a CPU don't sleep lightly, and what to write."""

NO_POOLER_SLEEP_ON_GPU: Final = (
    "light_sleep_after_s: a model that classifies or embeds sleeps lightly only on a CPU; write "
    "`device: cpu` and `num_gpus: 0`, or leave it out"
)
"""Why poolers on a GPU don't sleep lightly, and what to write."""


NO_POOLER_TURNS_ON_GPU: Final = (
    "classifies or embeds, and takes light turns only on a CPU: write `device: cpu` and `num_gpus: "
    "0` in its entry, take it out of the group, or the group out of `light`"
)
"""The same of turns, after the model's name."""


MODEL_ID: Final = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"


class AdapterConfig(StrictModel):
    """A LoRA adapter of a model, which clients ask for by an id of its own."""

    id: str = Field(min_length=1, max_length=96, pattern=MODEL_ID)
    """The name that clients use, as a model's."""
    source: str = Field(min_length=1)
    """A folder with adapter_config.json and adapter_model.safetensors, or the id of a hub
    repository; see the model's `source`.
    """


class ModelConfig(StrictModel):
    """One model: where it comes from, where it runs and how much it may hold."""

    id: str = Field(min_length=1, max_length=96, pattern=MODEL_ID)
    """The name that clients use. The model's deployment has the same name, with each `/` written as
    `--`.
    """
    source: str = Field(min_length=1)
    """A local folder, or the id of a hub repository. `~` is the user's home. A relative folder
    starts from the folder of this file with `raystream serve`, `deploy`, `plan` and `download`,
    from the folder that Ray was started in with `serve run` and `serve deploy`, or else from the
    shipped models; what is no folder there is an id.
    """
    revision: str | None = None
    """A commit of the hub repository; null takes the newest."""
    task: Task = "generate"
    """Whether the model generates text, classifies texts or embeds them: turns them into vectors.
    A cross-encoder, which says how well two texts fit, classifies with one label. Unless the model
    generates, its limits on tokens count those of the texts, and `quantization`, `max_num_seqs`,
    `kv_cache_memory_bytes`, `prefix_caching`, `cuda_graphs` and the parsers are refused.
    """
    engine: Engine = "raystream"
    """What runs the model: raystream's own engine, or vLLM, in an environment of its own that
    `raystream install-engine vllm` makes, for models that are too large for one GPU, that are
    quantized, or that only vLLM knows; see docs/vllm.md.
    """
    engine_python: str | None = Field(default=None, min_length=1)
    """The folder of vLLM's environment, such as envs/vllm-0.32; a relative one starts where a
    relative `source` does. null takes `.venv-vllm` beside raystream's own environment. Only with
    `engine: vllm`, like the next four.
    """
    engine_urls: tuple[ServerUrl, ...] = ()
    """Servers of vLLM that run already, all with this model, such as http://10.0.0.7:8000, started
    with `--tokens-only` or `--enable-scale-out`: the replicas hold no model, and send them token
    ids. `source` needs the tokenizer's files only. The environment's VLLM_API_KEY is their key.
    """
    engine_args: VllmArgs = VllmArgs()
    """vLLM's own arguments, by its names."""
    adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters of the model, each with the `id` that clients ask for and a `source`, a folder
    with adapter_config.json and adapter_model.safetensors or the id of a hub repository. Every
    replica loads all of them.
    """
    exact: bool = False
    """Whether vLLM only uses kernels with which a sequence's tokens don't depend on what runs
    beside it (VLLM_BATCH_INVARIANT), which is slower and needs a newer GPU.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The weights' type on the device. auto keeps the files' type, but on a CPU float16 becomes
    float32, and so does every type if the CPU lacks AVX512_BF16.
    """
    quantization: Literal["int8", "int4"] | None = None
    """int8 and int4 hold the language model's linear layers in about a half and a quarter of
    bfloat16's bytes: decoding is faster, and texts differ from those of the original weights,
    slightly in int8 and visibly in int4. Only on a CPU. null leaves them as `dtype` says.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes. auto takes the GPU that Ray assigned, else the CPU."""
    num_gpus: Auto | float = "auto"
    """GPUs that Ray reserves for each replica: 0, or a share of one. auto is `gpu_share` if the
    cluster has GPUs when the file is deployed, else 0. A model that vLLM divides among several GPUs
    has them whole.
    """
    gpu_share: Auto | Annotated[float, Field(gt=0, le=1)] = "auto"
    """The share of a GPU that `num_gpus: auto` asks for; a replica allocates no more than it. auto
    is a whole GPU if there is one for each model of the file, else what the model needs beside the
    others. `raystream plan` shows it. With `engine: vllm` auto is a whole GPU.
    """
    num_cpus: Auto | Annotated[float, Field(ge=0)] = "auto"
    """CPUs that Ray reserves for each replica. It decides where a replica fits and limits nothing.
    auto is 1, or less if all replicas of the file need less to fit on the nodes that the cluster
    has when the file is deployed. Where nodes are added with the load, write a number.
    """
    num_threads: Auto | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Threads that a model on a CPU computes with. auto takes all cores for large models, and all
    but one for small ones.
    """
    max_model_len: Auto | Annotated[int, Field(ge=2)] = "auto"
    """The most tokens of prompt and answer together. Unless the model generates, the most tokens of
    one text, special ones included, or as many as the model reads if that is less. auto, here and
    in the next two, lets each replica choose by its model and device: as many as the model can take
    and the memory holds. The replica's log tells the numbers.
    """
    max_num_seqs: Auto | Annotated[int, Field(ge=1)] = "auto"
    """The most sequences that run at once, if their tokens fit into the KV memory. auto is up to
    256 on a GPU, and up to 16 on a CPU.
    """
    max_batched_tokens: Auto | Annotated[int, Field(ge=1)] = "auto"
    """The most tokens of one engine step (decode rows and prefill chunks), or of one micro-batch of
    texts. auto is 2048, but 512 for steps on a CPU, and up to 16384 for texts that a GPU packs.
    """
    max_stall_ms: int | None = Field(default=None, ge=1)
    """How long a step with tokens of new prompts may take while other sequences run, whose clients
    wait for their next tokens meanwhile, or two decode steps if those take longer. Readers see
    smaller gaps, and new requests wait longer for their first token. null lets a step have as many
    tokens as `max_batched_tokens` says.
    """
    kv_cache_memory_bytes: Auto | Annotated[int, Field(ge=1)] = "auto"
    """The most memory that each replica takes for keys and values, which bounds how many sequences
    run at once, and how long they may be. On a CPU it is only reserved: memory is taken when
    sequences need it, and given back some seconds after it is free. auto is a quarter of the
    machine's memory, or of the container's limit, on a CPU, and all that the share leaves on a GPU;
    no number gives more than is free at the start.
    """
    max_queued_requests: int = Field(default=64, ge=0)
    """Sequences that may wait for their turn on each replica; each prompt counts once for each of
    its answers (`n`). Unless the model generates, HTTP requests that may wait for the device,
    whatever their number of texts. Further requests get a 503 with `Retry-After`. `user_config` of
    the model's deployment can change this limit, and `max_queued_tokens`, while the model runs.
    """
    max_queued_tokens: int | None = Field(default=None, ge=0)
    """Tokens that may wait on each replica: those of prompts, and those that may be generated.
    Without max_tokens a sequence counts with its default length: completions' 16, or the generation
    config's `max_new_tokens`, or all that `max_model_len` leaves. null limits only the number of
    sequences. At least `max_model_len`; one that the replica has chosen raises it to as much.
    """
    prefix_caching: bool = True
    """Whether the common beginning of prompts (a system prompt, earlier turns) is computed once.
    All clients share the cache, so from the time of its first token a client can tell whether
    another client's prompt began like its own; false prevents that.
    """
    cuda_graphs: bool = True
    """Whether decode steps on a GPU are captured and launched as a whole, which takes some memory;
    false launches them kernel by kernel. Has no effect on a CPU.
    """
    light_sleep_after_s: Auto | Annotated[float, Field(gt=0)] | None = "auto"
    """Seconds without a request after which a replica gives the memory of its weights, and of keys
    and values, back and keeps its process; the next request reads the weights back from a file in
    the cache folder, or on a GPU from host memory, which takes a part of a start. Models that
    classify or embed sleep so, too, but not on a GPU, and vLLM's only on a GPU and if they
    generate. auto does so for models of raystream's own engine on a CPU with `min_replicas: 0` and
    `LoadPolicy`, when Serve would otherwise end their process (`downscale_to_zero_delay_s`). null
    never does.
    """
    deep_sleep_after_s: float | None = Field(default=DEEP_SLEEP_AFTER_S, gt=0)
    """Seconds of light sleep after which a replica's process ends, if `min_replicas` is 0 and
    `LoadPolicy` scales the model. null leaves the process until the machine's memory is short.
    """
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "openai", "none"] = "auto"
    """How the model writes tool calls. auto asks its chat template, none refuses tools; the names
    are vLLM's.
    """
    reasoning_parser: Literal["auto", "qwen3", "deepseek_r1", "openai_gptoss", "none"] = "auto"
    """How the model marks its reasoning, which answers hold separately. auto asks its chat
    template, deepseek_r1 takes text without `<think>` for reasoning too, none leaves it in the
    content; the names are vLLM's.
    """

    @model_validator(mode="before")
    @classmethod
    def _move_engine_args(cls, data: Any) -> Any:
        """Put what `engine_args` says of the entry's own keys there: all of the server reads it."""
        given = data.get("engine_args") if isinstance(data, dict) else None
        if not isinstance(given, dict):
            return data
        try:
            VllmArgs.model_validate(given)
        except ValidationError:  # found at its own place
            return data
        moved = {
            name: key
            for name, key in ENTRY_KEYS.items()
            if given.get(name) is not None and key not in data
        }
        left = {name: value for name, value in given.items() if name not in moved}
        return {**data, "engine_args": left, **{key: given[name] for name, key in moved.items()}}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        self._check_engine()
        self._check_gpus()
        if self.task != "generate":
            self._check_pooler()
        if self.quantization is not None and self._runs_on_gpu:
            raise ValueError(
                f"quantization {self.quantization!r} runs only on a CPU; write `device: cpu` "
                "and `num_gpus: 0`, or `quantization: null`"
            )
        if number(self.light_sleep_after_s) is not None:
            self._check_light_sleep()
        if "deep_sleep_after_s" in self.model_fields_set and not self.may_sleep_lightly:
            raise ValueError(
                "deep_sleep_after_s: the model never sleeps lightly, so its process ends after "
                "`downscale_to_zero_delay_s`; leave it out, or write the seconds after which it "
                "sleeps lightly as `light_sleep_after_s`"
            )
        num_seqs, step_tokens = number(self.max_num_seqs), number(self.max_batched_tokens)
        if self.task == "generate" and num_seqs and step_tokens and step_tokens < num_seqs:
            raise ValueError(
                f"max_batched_tokens ({step_tokens}) must be at least max_num_seqs ({num_seqs}): "
                "each running sequence needs one token in every step"
            )
        if self.max_queued_tokens is not None and self.has_too_few_tokens(self.max_queued_tokens):
            message = self.too_few_tokens_message(self.max_queued_tokens)
            raise ValueError(f"max_queued_tokens: {message}")
        return self

    def _check_light_sleep(self) -> None:
        if self.engine == "raystream":
            if self.task != "generate" and self._runs_on_gpu:
                raise ValueError(NO_POOLER_SLEEP_ON_GPU)
        elif self.task != "generate" or self.engine_urls:
            raise ValueError(
                "light_sleep_after_s: of vLLM's models, only those that generate in processes of "
                "the replica's sleep lightly; leave it out"
            )
        elif self.device == "cpu" or self.num_gpus == 0:
            raise ValueError(NO_VLLM_SLEEP_ON_CPU)

    def _check_engine(self) -> None:
        if self.engine == "raystream":
            if given := [key for key in VLLM_KEYS if key in self.model_fields_set]:
                raise ValueError(f"{', '.join(given)}: write `engine: vllm` too, or leave that out")
            return
        if self.adapters and self.task != "generate":
            raise ValueError("adapters: only a model that generates has them")
        if self.engine_urls:
            self._check_fleet()
        for key, instead in NOT_OF_VLLM.items():
            if getattr(self, key) not in (None, type(self).model_fields[key].default):
                raise ValueError(f"engine vllm has no {key}: {instead}")
        if twice := [name for name in self.engine_args.given if name in ENTRY_KEYS]:
            keys = " and ".join(f"`{ENTRY_KEYS[name]}`" for name in twice)
            raise ValueError(
                f"engine_args: {', '.join(twice)}: the entry has {keys}, too; leave one out"
            )

    def _check_fleet(self) -> None:
        if self.task != "generate":
            raise ValueError(
                f"engine_urls: only generation reaches servers that run already, not {self.task!r}"
            )
        if given := [key for key in NOT_OF_FLEETS if key in self.model_fields_set]:
            raise ValueError(
                f"engine_urls: servers that run already have their own {', '.join(given)}; leave "
                "that out"
            )
        if len(set(self.engine_urls)) < len(self.engine_urls):
            raise ValueError("engine_urls: a server is named twice")

    def _check_gpus(self) -> None:
        num_workers = self.engine_args.num_workers
        if self.engine_args.distributed_executor_backend is not None and num_workers == 1:
            raise ValueError(
                "engine_args: distributed_executor_backend starts the workers of a divided model; "
                "write tensor_parallel_size or pipeline_parallel_size too, or leave it out"
            )
        if self.engine_args.uses_ray:
            self._check_ray_workers()
        if num_workers > 1:
            if self.num_gpus not in ("auto", 0, num_workers):
                raise ValueError(
                    f"num_gpus must be 'auto', 0 or {num_workers}: engine_args divides the model "
                    "among so many GPUs"
                )
            if self.gpu_share not in ("auto", 1):
                raise ValueError("gpu_share: a replica with several GPUs has them whole")
        elif self.num_gpus != "auto" and not 0 <= self.num_gpus <= 1:
            raise ValueError(
                "num_gpus must be 'auto', or from 0 to 1: a replica runs on one GPU, unless "
                "`engine: vllm` and `engine_args: {tensor_parallel_size: ...}` divide its model"
            )
        share = number(self.gpu_share) if self.num_gpus == "auto" else self.num_gpus
        utilization = self.engine_args.gpu_memory_utilization
        if utilization is not None and share and utilization > share:
            raise ValueError(
                f"engine_args: gpu_memory_utilization ({utilization:g}) is more than the replica's "
                f"share of the GPU ({share:g}); leave it out, or lower it"
            )

    def _check_ray_workers(self) -> None:
        """Check what a model asks for whose workers Ray starts, each on a GPU of its own."""
        if self.task != "generate":
            raise ValueError(
                "engine_args: distributed_executor_backend: only a model that generates may be "
                f"divided among several nodes, not one with task {self.task!r}; leave it out"
            )
        if self.device == "cpu" or self.num_gpus == 0:
            raise ValueError(
                "engine_args: distributed_executor_backend: Ray starts workers on GPUs only; leave "
                "it out, or `device` and `num_gpus`"
            )

    def _check_pooler(self) -> None:
        unusable = [key for key in GENERATION_KEYS if key in self.model_fields_set]
        if unusable:
            raise ValueError(f"task {self.task!r} has no {', '.join(unusable)}; leave that out")

    def has_too_few_tokens(self, max_queued_tokens: int) -> bool:
        """Return whether a single request of full length would exceed a limit on tokens.

        A length that the replica chooses is not known here; the replica then raises the limit to
        it.
        """
        max_model_len = number(self.max_model_len)
        return max_model_len is not None and max_queued_tokens < max_model_len

    def too_few_tokens_message(self, max_queued_tokens: int) -> str:
        """Return the message for a limit that a single request of full length would exceed."""
        return (
            f"{max_queued_tokens} is less than max_model_len ({self.max_model_len}), so the "
            "longest requests could never be queued; raise it, or write null"
        )

    def ongoing_requests(self, max_queued_requests: int | None = None) -> int:
        """Return how many calls a replica must accept at once so that none waits in Ray's router.

        Args:
            max_queued_requests: The value in `user_config`, if it replaces this entry's.
        """
        max_queued = (
            self.max_queued_requests if max_queued_requests is None else max_queued_requests
        )
        # A pooler's device takes the whole queue at once; then the queue may fill up again.
        num_running = self._most_seqs if self.task == "generate" else max_queued + 1
        return num_running + max_queued + ONGOING_MARGIN

    @property
    def _most_seqs(self) -> int:
        """The most sequences that run at once, whatever the replica chooses."""
        return number(self.max_num_seqs) or MAX_AUTO_SEQS

    @property
    def _runs_on_gpu(self) -> bool:
        """Whether the entry explicitly asks for a GPU; with only `auto` it may get one or not."""
        has_share = self.num_gpus != "auto" and self.num_gpus > 0
        return self.device == "cuda" or (self.device == "auto" and has_share)

    @property
    def can_take_light_turns(self) -> bool:
        """Whether it sleeps lightly at all if its entry allows that, and may wait for a turn."""
        return self.engine == "raystream" and self.can_sleep_lightly

    @property
    def can_sleep_lightly(self) -> bool:
        """Whether a replica can give the model's memory back and keep its process."""
        if self.engine == "raystream":
            return self.task == "generate" or not self._runs_on_gpu
        is_on_cpu = self.device == "cpu" or self.num_gpus == 0
        return self.task == "generate" and not self.engine_urls and not is_on_cpu

    @property
    def may_sleep_lightly(self) -> bool:
        """Whether a replica sleeps lightly, if it is scaled so that `auto` means it."""
        after_s = self.light_sleep_after_s
        if after_s == "auto" and (self.engine == "vllm" or self._runs_on_gpu):
            return False
        return self.can_sleep_lightly and after_s is not None

    @property
    def max_num_admitted(self) -> int:
        """The most requests that one replica admits, running and waiting."""
        return self.max_queued_requests + (self._most_seqs if self.task == "generate" else 1)

    @property
    def deployment_name(self) -> str:
        """The name of the model's deployment in Ray."""
        return deployment_name_of(self.id)


def part_of_turn(amount: float, num_turns: int) -> float:
    """Return what Ray reserves for each of the models that take light turns on an amount.

    Args:
        amount: Cores or GPUs of the one that has the turn.
        num_turns: How many models there are.
    """
    if num_turns == 1:
        return amount
    return floor(amount / num_turns * RAYS_UNITS + TOLERANCE) / RAYS_UNITS


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model, with the settings that depend on the cluster resolved.

    Attributes:
        entry: The model's entry in the file. Values that are still auto there each replica chooses
            by its device; see `deployments.plan.replica_plan`.
        source: An absolute folder, or the id of a hub repository.
        num_gpus: What Ray reserves for each replica: 0, a share of one GPU, or several GPUs.
        tracing: Where the replicas' spans go; None turns tracing off.
        priority_aging_s: `limits.priority_aging_s` of the configuration.
        turn_group: The group whose models take turns and sleep lightly in between
            (`deployments.turns`); None for a model in no such group.
        num_turns: How many models are in that group. They divide what Ray reserves, since all of
            their processes run; each plans its memory with the whole.
    """

    entry: ModelConfig
    source: str
    num_gpus: float
    tracing: TracingSettings | None = None
    priority_aging_s: float = PRIORITY_AGING_S
    turn_group: str | None = None
    num_turns: int = 1

    @property
    def id(self) -> str:
        """The name that clients ask for."""
        return self.entry.id

    def light_sleep_after_s(self, to_zero_s: float | None) -> float | None:
        """Return after how many seconds without use a replica falls asleep lightly; None for never.

        Args:
            to_zero_s: After how many Serve would end the last process; None if it never does.
        """
        given = self.entry.light_sleep_after_s
        if given != "auto":
            return given
        # A GPU that Ray has reserved is of no use to other models while the process stays.
        can_sleep = self.entry.may_sleep_lightly and not self.num_gpus
        return None if to_zero_s is None or not can_sleep else max(to_zero_s, MIN_AUTO_SLEEP_S)

    @property
    def root(self) -> str:
        """The hub repository of the model's files; for a folder, the id, to show no path."""
        return self.id if os.path.isabs(self.source) else self.source

    @property
    def num_own_gpus(self) -> float:
        """The GPUs that Ray reserves for the replica's actor; workers of Ray's have their own."""
        if self.entry.engine_args.uses_ray:
            return 0.0
        return part_of_turn(self.num_gpus, self.num_turns)

    @property
    def device_share(self) -> float:
        """The fraction of each device's memory that a replica may use; 1 on a CPU."""
        return min(1.0, self.num_gpus) or 1.0
