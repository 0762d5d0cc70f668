"""The products of a compiled kernel in which strides of tensors take part, read from its TTIR, or TTGIR of Gluon.

`faults(ir)` lists those that are taken in 32 bits: an index times a stride may count more elements than these hold, of
a tensor [T, H, D] that lies head by head as soon as it has 2^31.
"""

from __future__ import annotations

import re

# Within a page: the host knows how long that is, and has kernels compiled otherwise where 32 bits do not count it
# (`launch.offsets_within_page_exceed_int32`).
_INSIDE_PAGES = re.compile(r"stride_((k|v|k_scales|v_scales|ckv|kpe|scales)_[sh]|slot|head)$|sk_s$")
_STRIDE = re.compile(r"(s[a-z]{1,3}_[a-z]|strides?_\w+)$")
_SAME = ("tt.splat", "tt.broadcast", "tt.expand_dims", "ttg.convert_layout")
_DEFINED = re.compile(r"\s*%([\w#]+) = ([\w.]+) (.*?)(?: loc\(.*)?$")


def faults(ir: str) -> list[str]:
    strides: dict[str, str] = {}  # value → the argument that it is
    captured: list[str] = []
    out: list[str] = []
    for line in ir.splitlines():
        if "tt.func public" in line:
            names = re.findall(r"%([\w.]+): i32", line)
            strides = {n: n for n in names if _STRIDE.match(n) and not _INSIDE_PAGES.match(n)}
        elif "ttg.warp_specialize(" in line:
            captured = re.findall(r"%([\w#]+)", line.split("ttg.warp_specialize(")[1].split(")")[0])
        elif re.match(r"\s*partition\d+\(", line):
            given = re.findall(r"%([\w#]+):", line)
            strides |= {name: strides[of] for name, of in zip(given, captured, strict=True) if of in strides}
        elif found := _DEFINED.match(line):
            name, how, rest = found.groups()
            of = [strides[x] for x in re.findall(r"%([\w#]+)", rest) if x in strides]
            strides.pop(name, None)
            if of and how in _SAME:
                strides[name] = of[0]
            elif of and how == "arith.muli" and re.search(r"\bi32>?$|xi32(, #\w+)?>$|xi32, #.*>$", rest.strip()):
                out.append(f"an index times {of[0]} in 32 bits: {line.strip()}")
    return out
