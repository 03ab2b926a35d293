"""Keeps a model's trace for later starts, which then need not import and run torch's tracer.

Replicas that trace and replicas that read must compute the same to the last bit, or an answer that
moves between them would change. So a trace that can be kept always runs as it is read from its
text, also where it was made.

A file's key holds all that a trace depends on: the versions, the source of `deployments`, the
processor, and each module with its class, its configuration, its numbers and the shapes of its
tensors. A model that was changed by hand, such as one with a hook, has parts that no key can
hold, and is traced at each start.
"""

import json
import logging
import platform
from dataclasses import dataclass, fields
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedConfig

from deployments.compute.fusion.fused_operators import FusedOperators
from deployments.compute.kept_files import TRACES, source_digest
from deployments.compute.traced_model.graph_text import GraphText, UnwritableGraphError
from deployments.plan.processor import features

logger = logging.getLogger(__name__)

OWN: Final = frozenset(vars(torch.nn.Module()))
"""Attributes that each module has."""

HELD: Final = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}
)
"""Those of them that may be filled, or say nothing of a pass; the others are hooks."""

SOURCES: Final = {"name_or_path", "_name_or_path"}
"""Where a model and its configuration were loaded from; elsewhere the trace is the same."""

KNOWN_CODE: Final = ("torch", "transformers", "deployments")
"""Packages whose versions, or whose source, are in the key."""


class UnknownPartError(ValueError):
    """A model has a part that a key can't hold; the message names it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace, as it is kept: before its linear layers are replaced by kernels.

    Attributes:
        plain: Calls torch's operators.
        fused: The same with fused operators; None if none can be fused.
        notes: What its caller has noted while the model was traced: numbers, texts, and tensors of
            the model, in lists.
    """

    plain: torch.fx.GraphModule
    fused: torch.fx.GraphModule | None
    notes: Any


class KeptTrace:
    """The place of a model's trace on disk."""

    def __init__(self, model: torch.nn.Module, ops: FusedOperators, purpose: str) -> None:
        """Find the place; nothing is read.

        Args:
            model: On the CPU, its weights packed.
            ops: The operators that are fused.
            purpose: Tells traces of one model apart: what is traced, with which inputs.
        """
        self._text = GraphText(model, ops)
        self._unwritten: bytes | None = None
        self._key: bytes | None = None
        try:
            self._key = _key_of(model, self._text.shared, ops, purpose)
        except UnknownPartError as error:
            logger.info("the model's trace is not kept for later starts: %s", error)

    def read(self) -> Trace | None:
        """Return the trace; None if there is none that can be used."""
        content = None if self._key is None else TRACES.read(self._key)
        try:
            return None if content is None else self._read_from(content)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            logger.warning("a model's trace can't be read, and is made again: %s", error)
            return None

    def prepare(self, trace: Trace) -> Trace:
        """Prepare a trace for `write`, and return it as later starts will read it.

        What can't be kept is returned as it is.
        """
        if self._key is None:
            return trace
        try:
            graphs = [self._text.write(each) for each in (trace.plain, trace.fused) if each]
            found = {"graphs": graphs, "notes": self._text.write_value(trace.notes)}
        except UnwritableGraphError as error:
            logger.info("the model's trace is not kept for later starts: it has %s", error)
            return trace
        self._unwritten = json.dumps(found, separators=(",", ":")).encode()
        return self._read_from(self._unwritten)

    def _read_from(self, content: bytes) -> Trace:
        found = json.loads(content)
        plain, *fused = (self._text.read(each) for each in found["graphs"])
        notes = self._text.read_value(found["notes"], {})
        return Trace(plain, fused[0] if fused else None, notes)

    def write(self) -> None:
        """Write the trace that was prepared, if there is one."""
        if self._key is not None and self._unwritten is not None:
            TRACES.write(self._key, self._unwritten)


def _key_of(model: torch.nn.Module, shared: object, ops: FusedOperators, purpose: str) -> bytes:
    """Return all that a trace depends on.

    Raises:
        UnknownPartError: The model has a part that can't be described.
    """
    versions = platform.python_version(), torch.__version__, transformers.__version__
    machine = sorted(features().items()), torch.backends.cpu.get_cpu_capability()
    operators = [_described(getattr(ops, field.name)) for field in fields(ops)]
    modules = [_describe_module(path, module) for path, module in model.named_modules()]
    parts = (versions, source_digest(), machine, operators, modules, shared)
    return repr((purpose, torch.get_default_dtype(), *parts)).encode()


def _describe_module(path: str, module: torch.nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    if hooks := sorted(name for name in OWN - HELD if own.get(name)):
        raise UnknownPartError(f"{path or 'the model'} has {', '.join(hooks)}")
    held = {name: value for name, value in own.items() if name not in OWN | SOURCES}
    held |= {**module._parameters, **module._buffers}
    described = sorted((name, _described(each)) for name, each in held.items())
    return path, _name_of(type(module)), described


def _described(value: object) -> str:
    """Return what decides a trace of a value that a module holds.

    Raises:
        UnknownPartError: It is code without a name.
    """
    match value:
        case torch.Tensor():
            return f"{value.dtype} {tuple(value.shape)} {value.layout} {value.device}"
        case None | bool() | int() | float() | str() | torch.dtype() | torch.device():
            return repr(value)
        case list() | tuple():
            return repr([type(value).__name__, *map(_described, value)])
        case set() | frozenset():
            return repr(sorted(map(_described, value)))
        case dict():
            return repr({str(name): _described(each) for name, each in value.items()})
        case FunctionType() | MethodType() | BuiltinFunctionType():
            name, module = value.__qualname__, value.__module__ or ""
            if "<" in name or module.partition(".")[0] not in KNOWN_CODE:
                raise UnknownPartError(f"a module holds the function {module}.{name}")
            return f"{module}.{name}"
        case partial():
            return repr(("partial", *map(_described, (value.func, value.args, value.keywords))))
        case PreTrainedConfig():
            held = {name: each for name, each in value.to_dict().items() if name not in SOURCES}
            return json.dumps(held, sort_keys=True, default=str)
    return _name_of(type(value))


def _name_of(kind: type) -> str:
    """Return a class's name.

    Raises:
        UnknownPartError: It is of an unknown package.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name.partition(".")[0] not in KNOWN_CODE:
        raise UnknownPartError(f"a module is, or holds, a {name}")
    return name
