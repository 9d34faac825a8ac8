"""Run a script or module as one rank under `polyreme.launch.torchrun`.

`python -m polyreme.launch.rank LAUNCHER_PID [--saves] [-m MODULE | --program PROGRAM | SCRIPT] ARGUMENTS...`

With --saves, the status STOPPED is no failure. A program replaces this process.

Invariants: the rank does not outlive its launcher. A rank that fails writes the reason to the file that the
launcher names, and then waits for the launcher to end it: its connections stay open meanwhile, so that its
failure causes none on other ranks before the launcher has seen which rank was first."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from polyreme.distributed.failure import explained, traceback_of
from polyreme.distributed.torch_backends import after_import
from polyreme.errors import LaunchError, PolyremeError
from polyreme.launch import limits
from polyreme.launch.cores import pin
from polyreme.launch.processes import die_with_parent
from polyreme.launch.requests import STOPPED
from polyreme.launch.signals import ignore_copies

LAUNCHER_TIMEOUT = 20.0  # seconds to wait for the launcher, which usually takes 0.1 s


def main(arguments: list[str]) -> None:
    """Run as a rank; `arguments` as in the module's docstring, without the program's name."""
    parent, *arguments = arguments
    die_with_parent(int(parent))
    pin()
    if saves := arguments[0] == "--saves":
        del arguments[0]
    if arguments[0] == "--program":
        _become(arguments[1:])
    is_module = arguments[0] == "-m"
    target = arguments[is_module]
    try:
        # the launcher started the rank with it blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if "torch" not in sys.modules:
            after_import("torch", _keep)
        run(arguments)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        # an interrupted or saved rank needs no error file
        if end.code == 128 + signal.SIGINT or (saves and end.code == STOPPED):
            raise
        if end.code not in (None, 0):
            _fail(end, end.code if isinstance(end.code, int) else 1)
    except Exception as error:
        file = traceback.extract_tb(error.__traceback__)[-1].filename
        if is_module and isinstance(error, ImportError) and file == "<frozen runpy>":  # nothing of it has run
            error = LaunchError(
                f"-m {target}: {error}; name a module that Python finds from {Path.cwd()}, or give a script"
            )
        _fail(error if isinstance(error, PolyremeError) else limits.named(error) or error, 1)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # the rank is done: Ctrl-C would only print a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(arguments: list[str]) -> None:
    """Run `[-m MODULE | SCRIPT] ARGUMENTS...` in this process, as `python` does."""
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):
            # Into a pipe, too; and not less than a line, even with PYTHONUNBUFFERED, or the output of several
            # ranks would mix within one.
            stream.reconfigure(line_buffering=True, write_through=False)
            if stream.encoding != "utf-8":
                with contextlib.suppress(OSError):  # it has become a pipe since
                    stream.reconfigure(errors="backslashreplace")  # unencodable output must not end a rank
    faulthandler.enable()  # a crash in compiled code shows where
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    target = sys.argv[0]
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(target).resolve().parent)  # as `python script.py` has it
            runpy.run_path(target, run_name="__main__")
    finally:
        ignore_copies()


def _keep(torch: Any) -> None:
    """Exclude the objects that modules have made from Python's garbage collection, so that a rank ends a
    second sooner. Imports torch._dynamo, which the first optimizer would import later, before that."""
    importlib.import_module("torch._dynamo")
    gc.freeze()


def _become(command: list[str]) -> NoReturn:
    """Replace this process by a program, which keeps the cores, and dies with the launcher as well."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _fail(LaunchError(f"the program {command[0]!r} cannot be run: {error.strerror}"), 1)


def _fail(error: Exception | SystemExit, status: int) -> NoReturn:
    """Write `error` for the launcher, which prints one report for all ranks, and wait for the end."""
    try:
        _write(error, time.time())
        # raises SystemExit, so that clean-up at exit runs
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
        time.sleep(LAUNCHER_TIMEOUT)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(status)


def _write(error: Exception | SystemExit, at: float) -> None:
    """Write the error file, in the format of torch.distributed.elastic with three further fields."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        traceback.print_exception(error)
        return
    expected = isinstance(error, PolyremeError | SystemExit)
    facts = {
        "py_callstack": traceback_of(error),
        "timestamp": str(int(at)),
        "at": at,  # with fractions, to tell which rank was first
        "expected": expected,  # it explains itself, its traceback is for --debug
        "exit_status": error.exit_status if isinstance(error, PolyremeError) else 1,
    }
    message = explained(error)
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps({"message": {"message": message, "extraInfo": facts}}))
    draft.replace(path)  # atomic: the file is complete once it is there


if __name__ == "__main__":
    main(sys.argv[1:])
