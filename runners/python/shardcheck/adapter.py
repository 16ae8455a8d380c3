"""The adapter process: `python -m shardcheck.adapter MODULE:CLASS` answers a harness until told to end."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardcheck import __version__
from shardcheck.control import Leader, Stuck, control_path, follow
from shardcheck.desk import Answer, Desk, failure
from shardcheck.engine import Engine, Unsupported
from shardcheck.loading import LoadError, check_methods, load_engine, profile_of, session_type_of
from shardcheck.profile import Profile
from shardcheck.progress import process_count, process_rank
from shardcheck.wire import MAX_INLINE_BYTES, Connection, Message, NoRoom, ProtocolError, connect

PROTOCOL = 1
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CANNOT_RUN_HERE = 89

HELP = f"""\
usage: python -m shardcheck.adapter [--profile] MODULE:CLASS [--OPTION VALUE ...]

Puts an engine behind the process protocol of shardcheck (docs/protocol.md). The harness starts this command:

    shardcheck run --engine exec:'python3 -m shardcheck.adapter my_module:MyEngine' --suite engine-smoke
    shardcheck run --engine exec:'torchrun --nproc-per-node 4 -m shardcheck.adapter my_module:MyEngine'

arguments:
  MODULE:CLASS       a class that derives from shardcheck.Engine; `path/to/file.py:CLASS` is one too
  --OPTION VALUE     goes to the constructor as OPTION='VALUE', dashes as underscores; so does --OPTION=VALUE

options, before MODULE:CLASS:
  --profile          load the engine, print what it would declare as JSON, and end; needs no harness
  --version          print the version of this SDK
  -h, --help         print this

environment, set by the harness:
  SHARDCHECK_ADDRESS   unix:PATH of the socket to connect to
  SHARDCHECK_TOKEN     the word to say in hello
  SHARDCHECK_FOLDER    where payloads of more than a megabyte lie
  SHARDCHECK_PROGRESS  the file that shows where each rank is

exit codes:
  0 told to end    {EXIT_FAILED} failed    {EXIT_USAGE} wrong usage
  {EXIT_CANNOT_RUN_HERE} can't run on this machine: module or constructor raised shardcheck.Unsupported
"""


class _Terminated(BaseException):
    """SIGTERM came."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the result is the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        flags, target, options = parse_command_line(words)
    except ValueError as error:
        print(f"shardcheck.adapter: {error}\n\n{HELP}", file=sys.stderr)
        return EXIT_USAGE
    if "--help" in flags:
        print(HELP)
        return 0
    if "--version" in flags:
        print(__version__)
        return 0
    only_profile = "--profile" in flags
    if not only_profile and "SHARDCHECK_ADDRESS" not in os.environ:
        text = "SHARDCHECK_ADDRESS is not set: the harness starts this command (--profile does without it)"
        print(f"shardcheck.adapter: {text}", file=sys.stderr)
        return EXIT_USAGE
    real_output = keep_output_for_log()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(target, options, real_output if only_profile else None)
    except _Terminated:
        return 0
    except Unsupported as reason:
        print(f"shardcheck.adapter: {target} can't run here: {reason}", file=sys.stderr)
        return EXIT_CANNOT_RUN_HERE
    except (LoadError, ProtocolError, TimeoutError) as error:
        print(f"shardcheck.adapter: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED


def parse_command_line(words: Sequence[str]) -> tuple[set[str], str, dict[str, str]]:
    """Flags of this command, the engine, and the engine's options; `ValueError` says what is wrong."""
    flags: set[str] = set()
    rest = list(words)
    while rest and rest[0].startswith("-"):
        flag = {"-h": "--help"}.get(rest[0], rest[0])
        if flag not in ("--help", "--version", "--profile"):
            raise ValueError(f"unknown option {rest[0]}: options of the engine come after MODULE:CLASS")
        flags.add(flag)
        rest.pop(0)
    if flags & {"--help", "--version"}:
        return flags, "", {}
    if not rest:
        raise ValueError("which engine? Say MODULE:CLASS")
    target, options = rest.pop(0), {}
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ValueError(f"{word!r} after the engine is no --OPTION VALUE")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ValueError(f"option --{name} has no value")
            value = rest.pop(0)
        options[name.replace("-", "_")] = value
    return flags, target, options


def keep_output_for_log() -> int:
    """Sends file descriptor 1 to where 2 goes, so that neither `print` nor C code reaches anything else.

    Returns a copy of what was 1. A descriptor 0, 1 or 2 that is closed gets the null device, or the socket
    would take its number.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout.flush()
    real_output = os.dup(1)
    os.dup2(2, 1)
    return real_output


def _run(target: str, options: dict[str, str], profile_output: int | None) -> int:
    rank, count = process_rank(), process_count()
    folder = Path(os.environ["SHARDCHECK_FOLDER"]) if os.environ.get("SHARDCHECK_FOLDER") else None
    token = os.environ.get("SHARDCHECK_TOKEN", "")
    # rank 0 listens before the engine is made: making it may take every rank, and a rank may be done early
    leads = count > 1 and rank == 0 and profile_output is None
    leader = Leader(control_path(folder, token), count - 1) if leads else None
    engine = load_engine(target, options)
    profile = checked_profile(engine)
    if profile_output is not None:
        with os.fdopen(profile_output, "w", encoding="utf-8") as output:
            print(json.dumps(profile.to_json(), indent=2), file=output)
        return 0
    desk = Desk(engine)
    try:
        if count > 1 and rank > 0:
            follow(desk, control_path(folder, token), folder, token, rank)
        else:
            if leader is not None:
                leader.gather_ranks(folder, token)
            connection = connect(os.environ["SHARDCHECK_ADDRESS"], folder)
            serve(connection, profile, desk, token, leader)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        desk.close()
        if leader is not None:
            leader.close()
    return 0


def checked_profile(engine: Engine) -> Profile:
    """The engine's profile, once declared operations and methods of its sessions have been held together."""
    profile = profile_of(engine)
    session = session_type_of(engine)
    undeclared = [] if session is None else check_methods(engine, session)
    if undeclared:
        assert session is not None
        who, what = type(engine).__name__, ", ".join(undeclared)
        text = f"{session.__name__} has {what}, which {who} doesn't declare: it is never asked for"
        print(f"shardcheck.adapter: {text}", file=sys.stderr)
    return profile


def serve(connection: Connection, profile: Profile, desk: Desk, token: str, leader: Leader | None) -> None:
    """Says hello, and answers until bye or end of connection; `ProtocolError` when a rule is broken."""
    hello = {
        "type": "hello",
        "token": token,
        "protocol": [PROTOCOL, PROTOCOL],
        "sdk": f"shardcheck-python {__version__}",
    }
    connection.send({**hello, "profile": profile.to_json()})
    welcome = connection.receive()
    if welcome is None:
        return
    if welcome.header["type"] == "refused":
        raise ProtocolError(f"the harness refuses: {welcome.header.get('reason')}")
    if welcome.header["type"] != "welcome" or welcome.header.get("protocol") != PROTOCOL:
        raise ProtocolError(f"instead of a welcome to protocol {PROTOCOL} came {welcome.header}")
    liked = welcome.header.get("inline_bytes")
    if isinstance(liked, int):
        connection.inline_bytes = min(liked, MAX_INLINE_BYTES)
    while (message := connection.receive()) is not None:
        if message.header["type"] == "bye":
            return
        if not isinstance(message.header.get("id"), int):
            raise ProtocolError(f"a `{message.header['type']}` without `id`")
        _reply(connection, message, desk, leader)


def _reply(connection: Connection, message: Message, desk: Desk, leader: Leader | None) -> None:
    def send(answer: Answer) -> None:
        header = {"type": "reply", "id": message.header["id"]}
        try:
            connection.send({**header, **answer.fields}, answer.tensors)
        except NoRoom as error:
            connection.send({**header, **failure(error).fields})

    if leader is None or message.header["type"] == "validate":
        send(desk.answer(message))
        return
    try:
        send(leader.ask_all(message, desk, send))
    except Stuck as stuck:
        send(stuck.answer)
        print(f"shardcheck.adapter: {stuck}; the process ends", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)


def _terminate(_signal: int, _frame: Any) -> None:
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
