"""The desk: one process's sessions, and its answer to each question of the harness."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardcheck.configuration import Configuration
from shardcheck.engine import Engine, EngineError, InputError, Reply, Session, Unsupported
from shardcheck.loading import check_methods
from shardcheck.progress import process_count, process_rank, progress
from shardcheck.tensor import Tensor
from shardcheck.wire import Input, Message, ProtocolError

_TRACEBACK_LINES = 24
_BINDING = frozenset({"lse_base", "padded_rows", "overlap", "shared"})
"""Parameters that change what is asked and are only sent where they do: a method that doesn't name one can't do it, though it take any."""
_DEVICE_ERROR = re.compile(r"(CUDA|HIP) error:|device-side assert|unspecified launch failure", re.IGNORECASE)


@dataclass
class Answer:
    """A reply without its id: the fields of its header, and its tensors."""

    fields: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """Whether the question was answered."""
        return self.fields["status"] == "ok"


class Desk:
    """Answers `validate`, `open`, `step` and `close` for one engine, whose failures become answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions: dict[Any, Session] = {}
        self._ended: set[Any] = set()
        self._told: set[str] = set()

    def answer(self, message: Message) -> Answer:
        """The answer to a question; `ProtocolError` when the question itself breaks a rule."""
        kind = message.header["type"]
        handle = {
            "validate": self._validate,
            "open": self._open,
            "step": self._step,
            "close": self._close,
        }.get(kind)
        if handle is None:
            raise ProtocolError(f"a message of unknown type {kind!r}")
        try:
            return handle(message)
        except ProtocolError:
            raise
        except Unsupported as reason:
            return unsupported(str(reason))
        except (Exception, SystemExit) as error:
            self.end(message.header.get("session"))
            return failure(error)

    def end(self, session: Any) -> None:
        """Ends a session after an error; a session that isn't open is left alone."""
        found = self._sessions.pop(session, None)
        if found is None:
            return
        self._ended.add(session)
        try:
            found.close()
        except Exception:
            traceback.print_exc()

    def close(self) -> None:
        """Closes what is open, before the process ends."""
        for session in list(self._sessions):
            self.end(session)
        try:
            self._engine.close()
        except Exception:
            traceback.print_exc()

    def _validate(self, message: Message) -> Answer:
        return unsupported(f"{self._engine.name} has no configuration rules")

    def _open(self, message: Message) -> Answer:
        session = _required(message, "session")
        try:
            configuration = Configuration.from_json(_required(message, "configuration"))
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"the configuration of an `open` lacks a field: {error}") from None
        opened = self._engine.open(configuration)
        check_methods(self._engine, type(opened))
        self._sessions[session] = opened
        return Answer({"status": "ok"})

    def _close(self, message: Message) -> Answer:
        session = _required(message, "session")
        found = self._sessions.pop(session, None)
        if found is not None:
            found.close()
        elif session not in self._ended:
            raise InputError(f"session {session} was never opened")
        self._ended.discard(session)
        return Answer({"status": "ok"})

    def _step(self, message: Message) -> Answer:
        session = self._sessions.get(_required(message, "session"))
        if session is None:
            gone = message.header["session"] in self._ended
            why = "ended with an earlier failure" if gone else "is not open"
            raise InputError(f"session {message.header['session']} {why}")
        operation, group = _group_of(_required(message, "operation"))
        if group and not self._engine.second_group:
            return unsupported(f"{self._engine.name} has one KV group")
        parameters = {key: value for key, value in operation.items() if key != "operation"}
        if self._engine.second_group:
            parameters["group"] = group
        inputs = message.inputs()
        kind = message.header.get("kind") or kind_of(operation, inputs)
        if kind not in self._engine.operations:
            return unsupported(f"{self._engine.name} has no {kind}")
        method = getattr(session, kind)
        if group and not _takes(method, "group"):
            raise TypeError(f"{method.__qualname__} takes no group: it would answer for the first one")
        arguments = arguments_for(method, {name: found.tensor for name, found in inputs.items()}, parameters)
        counts_before = _counts(session)
        returned = method(**arguments)
        reply = returned if isinstance(returned, Reply) else Reply(returned if returned is not None else {})
        if not isinstance(reply.outputs, Mapping):
            raise TypeError(f"{kind} returned {type(reply.outputs).__name__} instead of outputs by name")
        tensors = {name: _output(name, value) for name, value in reply.outputs.items() if value is not None}
        self._mind_outputs(kind, tensors)
        for name, found in inputs.items():
            if found.has_changed():
                tensors[f"input_after.{name}"] = found.tensor
        counts = list(reply.collectives) or _since(session, counts_before)
        if self._engine.counts_all_ranks and process_rank() > 0:
            counts = []  # rank 0 tells them
        effective = {str(key): _fact(value) for key, value in reply.effective.items()}
        fields = {"status": "ok", "effective": effective, "collectives": [int(count) for count in counts]}
        return Answer(fields, tensors)

    def _mind_outputs(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Says on standard error, once, what the harness will object to; the verdict is the harness's."""
        contract = self._engine.operations[kind].contract
        out = tensors.get("out")
        attends = kind in ("decode", "verify", "draft", "context")
        if attends and contract is not None and out is not None and out.dtype != contract.output:
            self._tell(f"{kind} returned `out` as {out.dtype}, but its contract declares {contract.output}")
        for name, tensor in tensors.items():
            if not tensor.shape and not name.startswith("input_after."):
                self._tell(f"{kind} returned `{name}` without axes: the first axis of an output is the rank")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(f"shardcheck: {text}", file=sys.stderr, flush=True)


def unsupported(reason: str) -> Answer:
    """The answer that there is none to be had."""
    return Answer({"status": "unsupported", "reason": reason})


def _takes(method: Any, name: str) -> bool:
    signature = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in signature)


def _group_of(operation: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """The operation, and the number of the KV group that it is on."""
    if operation.get("operation") != "in_group":
        return operation, 0
    return operation["step"], int(operation["group"])


def kind_of(operation: Mapping[str, Any], inputs: Mapping[str, Input]) -> str:
    """Name of the operation where a header doesn't say it: `attend` is `decode`, `verify` or `draft`."""
    name = str(operation.get("operation"))
    if name == "attend_context":
        return "context"
    if name != "attend":
        return name
    if operation.get("mask") == "bidirectional":
        return "draft"
    starts = inputs["query_start_loc"].tensor.codes
    return "verify" if (starts[1:] - starts[:-1] > 1).any() else "decode"


def arguments_for(
    method: Any, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of an operation's method: every tensor, and the parameters that its signature names.

    `Unsupported` when it takes no tensor of a given name or no parameter that it must mind, `TypeError` when it asks for something that isn't
    there.
    """
    signature = inspect.signature(method).parameters.values()
    named = {parameter.name for parameter in signature}
    binding = sorted(_BINDING.intersection(parameters) - named)
    if binding:
        raise Unsupported(f"{method.__qualname__} takes no {', '.join(binding)}")
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature):
        return {**parameters, **tensors}
    available = {**parameters, **tensors}
    required = [parameter.name for parameter in signature if parameter.default is inspect.Parameter.empty]
    missing = [name for name in required if name not in available]
    if missing:
        there = ", ".join(sorted(available))
        raise TypeError(f"{method.__qualname__} asks for {', '.join(missing)}; the operation has {there}")
    refused = [name for name in tensors if name not in named]
    if refused:
        raise Unsupported(f"{method.__qualname__} takes no {', '.join(refused)}")
    return {name: value for name, value in available.items() if name in named}


def _output(name: str, value: Any) -> Tensor:
    try:
        return Tensor.of(value)
    except TypeError as error:
        raise TypeError(f"output {name!r}: {error}") from None


def _fact(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _required(message: Message, key: str) -> Any:
    if key not in message.header:
        raise ProtocolError(f"a `{message.header['type']}` without `{key}`")
    return message.header[key]


def failure(error: BaseException) -> Answer:
    """The reply to an exception: what it says, then the last lines of its traceback."""
    lines = traceback.format_exception(error)
    sys.stderr.write("".join(lines))
    sys.stderr.flush()
    summary = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        summary = f"the engine asked the process to exit with {error.code!r}"
    tail = "".join(lines).rstrip().splitlines()[-_TRACEBACK_LINES:]
    fields: dict[str, Any] = {
        "status": "error",
        "class": _class_of(error),
        "text": "\n".join([summary, *tail]),
    }
    if isinstance(error, EngineError) and error.rank is not None:
        fields["rank"] = error.rank
    return Answer(fields)


def _class_of(error: BaseException) -> str:
    if isinstance(error, EngineError):
        return error.kind
    return "device_lost" if _DEVICE_ERROR.search(str(error)) else "crash"


def _ranks_here(session: Session) -> range:
    """Ranks that run in this process: its own under a launcher, else all of the session."""
    if process_count() > 1:
        return range(process_rank(), process_rank() + 1)
    configuration = getattr(session, "configuration", None)
    return range(configuration.tp) if configuration is not None else range(1)


def _counts(session: Session) -> list[int]:
    return [progress().count(rank) for rank in _ranks_here(session)]


def _since(session: Session, before: list[int]) -> list[int]:
    """What each rank here entered since `before`; nothing when this process has never counted for one."""
    now = _counts(session)
    return [after - earlier for after, earlier in zip(now, before)] if any(now) else []
