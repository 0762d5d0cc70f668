"""`tersekv eval`: what a cache format costs and keeps on a text of your own, in a model of your own."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..demo.attend import RUNNERS
from ..demo.measure import Settings
from ..demo.subject import BuiltIn
from .arguments import complain, positive
from .demo import add_common, blocked, show

BOTH = "both"
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    built_in = ", ".join((*RUNNERS, BOTH))
    parser.add_argument("--text", metavar="FILE", required=True, help="any file; a built-in model reads its bytes")
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
    add_common(parser, "tersekv-eval")


def run(args: argparse.Namespace) -> int:
    """Measure a model on the beginning of a file. Returns 2 for arguments that cannot work."""
    try:
        data = Path(args.text).read_bytes()
    except OSError as e:
        return complain(args, f"--text {args.text}: {e.strerror or e}")
    source = Path(args.text).name
    obstacle = blocked(args, args.text)
    if obstacle:
        return complain(args, obstacle)
    if args.model not in (*RUNNERS, BOTH):
        return _other(args, data, source)
    if Path(args.model, "config.json").is_file():
        both = f"a built-in model ({args.model}) and a folder with a model (./{args.model})"
        return complain(args, f"--model {args.model}: want one, but here it names {both}; ./ chooses the folder")
    if args.context is not None or args.dtype != "auto":
        return complain(args, f"--context and --dtype are of Hugging Face models; {args.model} has its own")
    none = torch.empty(0, dtype=torch.uint8)
    tokens = (torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else none).to(torch.int64)
    names = tuple(RUNNERS) if args.model == BOTH else (args.model,)
    return show(args, [BuiltIn(name, args.device) for name in names], tokens, source)


def _other(args: argparse.Namespace, data: bytes, source: str) -> int:
    """Measure a Hugging Face model."""
    try:
        from ..integrations.transformers_eval import HuggingFaceModel, NotAModelError
    except ImportError as e:
        if (e.name or "").split(".")[0] != "transformers":
            raise
        return complain(args, f"--model {args.model}: needs transformers (pip install transformers)")
    try:
        written = data.decode("utf-8")
    except UnicodeDecodeError as e:
        return complain(args, f"--text {args.text}: want UTF-8 text for a tokenizer, got {e.reason} at byte {e.start}")
    try:
        model = HuggingFaceModel(args.model, args.device, args.dtype, args.context)
        tokens = model.encode(written, args.tokens + 1)
        # Requests one by one: a large model fills the machine with one window of text.
        return show(args, [model], tokens, source, Settings(batch=1, chunk=512, page_size=64))
    except NotAModelError as e:
        return complain(args, f"--model {args.model}: {e}")
