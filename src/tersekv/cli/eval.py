"""`tersekv eval`: what a cache format costs and keeps on a text of your own."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from ..demo.attend import RUNNERS
from .demo import add_common, show

BOTH = "both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="FILE", required=True, help="any file; each byte is a token")
    parser.add_argument("--model", choices=(*RUNNERS, BOTH), default=BOTH, help="default: %(default)s")
    add_common(parser, "tersekv-eval", 4096)


def run(args: argparse.Namespace) -> int:
    """Measure the built-in models on the file's first bytes. Returns 2 for arguments that cannot work."""
    try:
        data = Path(args.text).read_bytes()
    except OSError as e:
        reason = f"tersekv eval: --text {args.text}: {e.strerror or e}"
        Console(stderr=True).print(reason, markup=False, soft_wrap=True)
        return 2
    none = torch.empty(0, dtype=torch.uint8)
    tokens = (torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else none).to(torch.int64)
    models = tuple(RUNNERS) if args.model == BOTH else (args.model,)
    return show(args, models, tokens, Path(args.text).name)
