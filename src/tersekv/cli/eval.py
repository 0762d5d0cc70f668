"""`tersekv eval`: what a cache format costs and keeps on a text of your own, in a model of your own."""

from __future__ import annotations

import argparse
import codecs
import sys
from pathlib import Path
from typing import BinaryIO

import torch

from ..demo.attend import RUNNERS
from ..demo.measure import Settings
from ..demo.subject import BuiltIn
from .arguments import complain, positive
from .demo import add_common, blocked, show

BOTH, STDIN = "both", "-"
_PIECE = 1 << 20  # bytes of a text that are read at once
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    built_in = ", ".join((*RUNNERS, BOTH))
    parser.add_argument(
        "--text", metavar="FILE", required=True,
        help=f"any file, or {STDIN} for standard input; a built-in model reads its bytes",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="NAME", default=BOTH,
        help=f"{built_in}: the built-in models; or a Hugging Face model, a folder or a name; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=positive, metavar="N",
        help="tokens of a window of the text, for a Hugging Face model; default: 2048, or what the model can",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="auto",
        help="of a Hugging Face model; default: auto, its own (float32 on a CPU, and no float32 on a GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--search", action="store_true",
        help="try mixes too, where K and V are cached: few bits rotated, with channel scales, beside 8 bits for K, "
        "between layers of 8 bits; of --formats if given; prints which of all are beaten by no other",
    )  # fmt: skip
    parser.add_argument(
        "--within", type=_distance, metavar="KL",
        help="name the smallest cache whose distance from the bf16 one is at most so many nats a byte or token",
    )  # fmt: skip
    parser.add_argument(
        "--save", metavar="FILE",
        help="keep the cache that --within names, or the one of --formats, in a safetensors file: its formats, signs, "
        "scales and channel scales, of a model that caches K and V; TersekvCache(config, saved=FILE) loads it",
    )  # fmt: skip
    parser.add_argument("--samples", action="store_true", help="print what the caches of a --search write, too")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measure a model on the beginning of a file. Returns 2 for arguments that cannot work."""
    piped, built_in = args.text == STDIN, args.model in (*RUNNERS, BOTH)
    # Asked before a text is typed, which would be lost.
    obstacle = blocked(args, "/dev/stdin" if piped else args.text) or (_mistaken(args) if built_in else None)
    if obstacle:
        return complain(args, obstacle)
    try:
        if not built_in:
            return _other(args)
        names = tuple(RUNNERS) if args.model == BOTH else (args.model,)
        subjects, settings = [BuiltIn(name, args.device) for name in names], Settings()
        data = _read(args, args.tokens + 1 + settings.batch * max(s.context for s in subjects))
    except TextError as e:
        return complain(args, f"--text {args.text}: {e}")
    none = torch.empty(0, dtype=torch.uint8)
    tokens = (torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else none).to(torch.int64)
    return show(args, subjects, tokens, _source(args), settings)


class TextError(ValueError):
    """The text cannot be read."""


def _source(args: argparse.Namespace) -> str:
    return "standard input" if args.text == STDIN else Path(args.text).name


def _distance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"want a number of nats, 0 or more, got {text!r}")
    return value


def _mistaken(args: argparse.Namespace) -> str | None:
    """Why a built-in model is not what these options want; None: it is."""
    if Path(args.model, "config.json").is_file():
        both = f"a built-in model ({args.model}) and a folder with a model (./{args.model})"
        return f"--model {args.model}: want one, but here it names {both}; ./ chooses the folder"
    if args.context is not None or args.dtype != "auto":
        return f"--context and --dtype are of Hugging Face models; {args.model} has its own"
    return None


def _read(args: argparse.Namespace, most: int) -> bytes:
    """The first bytes of the text, at most so many. On a terminal, who waits for whom is said. Raises TextError."""
    try:
        if args.text != STDIN:
            with open(args.text, "rb") as file:
                return _begin(file, most)
        if sys.stdin is None:
            raise TextError("there is no standard input")
        if sys.stdin.isatty():
            print("reading the text from the terminal; Ctrl-D on a new line ends it", file=sys.stderr, flush=True)
        return _begin(sys.stdin.buffer, most)
    except OSError as e:
        raise TextError(e.strerror or e) from None


def _begin(file: BinaryIO, most: int) -> bytes:
    """Returns the first bytes, read in pieces: read(n) allocates n bytes, however short the file."""
    parts = [b""]
    while most > 0:
        parts.append(file.read(min(most, _PIECE)))
        most -= _PIECE
        if len(parts[-1]) < _PIECE:  # the end: to ask again would make a terminal ask for it twice
            break
    return b"".join(parts)


def _other(args: argparse.Namespace) -> int:
    """Measure a Hugging Face model. Raises TextError."""
    if args.text != STDIN:
        _read(args, 0)  # before a model is looked for
    try:
        from ..integrations.transformers_eval import HuggingFaceModel, NotAModelError
    except ImportError as e:
        if (e.name or "").split(".")[0] != "transformers":
            raise
        return complain(args, f"--model {args.model}: needs transformers (pip install transformers)")
    try:
        model = HuggingFaceModel(args.model, args.device, args.dtype, args.context)
        most = args.tokens + 1 + model.context  # so many to calibrate on
        tokens = model.encode(_decoded(_read(args, model.bytes_of(most)), model.bytes_of(most)), most)
        # Requests one by one: a large model fills the machine with one window of text.
        return show(args, [model], tokens, _source(args), Settings(batch=1, chunk=512, page_size=64))
    except torch.OutOfMemoryError as e:
        return complain(args, f"--model {args.model}: want a model that fits into the device's memory; {e}")
    except NotAModelError as e:
        return complain(args, f"--model {args.model}: {e}")


def _decoded(data: bytes, most: int) -> str:
    """UTF-8 text of a file's first bytes, of which the last letter may lack some. Raises TextError."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < most)
    except UnicodeDecodeError as e:
        raise TextError(f"want UTF-8 text for a tokenizer, got {e.reason} at byte {e.start}") from None
