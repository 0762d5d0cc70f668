"""The commands of `tersekv`: demo, eval, bench, verify, doctor, warm-up. Each is a file here with `add_arguments` and
`run`."""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import os
import sys
from collections.abc import Sequence

from .. import __version__

# Command -> what `tersekv --help` says. Its file is imported only when it runs.
COMMANDS = {
    "demo": "two small built-in models with every cache format, side by side",
    "eval": "the same on a text, and in a model, of your own",
    "bench": "time the operations on this machine",
    "verify": "run every operation x format on a device and judge the results",
    "doctor": "what is installed, which backends can run here, and why not",
    "warm-up": "compile a model's kernels into a folder, without a GPU",
}

# What consoles without the letter get for it: "?" for all that is not listed.
_LETTERS = {"“": '"', "”": '"', "’": "'", "…": "...", "↵": "\\n", "×": "x", "µ": "u", "–": "-", "−": "-", "·": "-"}
_PLAIN = "tersekv.plain"
codecs.register_error(_PLAIN, lambda e: ("".join(_LETTERS.get(c, "?") for c in e.object[e.start : e.end]), e.end))  # type: ignore

INTERRUPTED = 130  # what shells say of a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)
    wanted = next((a for a in argv if a in COMMANDS), None)
    try:
        code = _run(argv, wanted)
        if sys.stdout is not None:
            sys.stdout.flush()  # a reader that has gone is noticed here, not when Python ends
        return code
    except KeyboardInterrupt:
        # On a terminal the line begins with ^C.
        start = "\n" if sys.stderr.isatty() else ""
        print(f"{start}{' '.join(filter(None, ('tersekv', wanted)))}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        return INTERRUPTED + 11  # as of a program that SIGPIPE ended


def _run(argv: list[str], wanted: str | None) -> int:
    about = "The KV cache of large language models in few bits, in pages."
    parser = argparse.ArgumentParser(prog="tersekv", description=about)
    parser.add_argument("--version", action="version", version=f"tersekv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == wanted:
            _module(name).add_arguments(command)
    args = parser.parse_args(argv)
    return _module(args.command).run(args)


def _module(name: str):
    return importlib.import_module(f"{__package__}.{name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
