"""SGLang's kernels of speculative decoding on a CPU, which its package for CPUs would bring: plain stand-ins."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from sglang.kernels.ops.kvcache import cache_move
from sglang.kernels.ops.speculative import cache_locs, eagle, reconstruct_tree, spec_tree
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative.ngram_worker import _derive_tree_links
from torch import Tensor


def stand_in(monkeypatch) -> None:
    for module, name, kernel in (
        (reconstruct_tree, "reconstruct_indices_from_tree_mask", _reconstruct),
        (allocation, "get_last_loc_triton", allocation.get_last_loc_torch),
        (allocation, "assign_req_to_token_pool_cpu", _assign),
        (cache_locs, "assign_extend_cache_locs_cpu", _extend_slots),
        (spec_tree, "sgl_verify_tree_greedy_cpu", _verify),
        (eagle, "fill_accept_out_cache_loc_cpu", _accepted_slots),
        (cache_locs, "assign_draft_cache_locs_contiguous_cpu", _draft_slots),
        (eagle, "fill_bonus_tokens_cpu", _bonus_tokens),
        (spec_tree, "sgl_build_tree_kernel_efficient_cpu", _tree),
        (cache_move, "copy_all_layer_kv_cache_cpu", _move),
    ):
        monkeypatch.setattr(module, name, kernel)


def _reconstruct(
    mask: Tensor, lens: Tensor, positions: Tensor, index: Tensor, following: Tensor, sibling: Tensor, b: int, n: int
) -> None:
    tree = mask.view(b, n, n)
    positions.copy_((lens[:, None] + tree.tril(-1).sum(-1)).flatten())
    index.copy_(torch.arange(b * n).view(b, n))
    for out, links in zip((following, sibling), _derive_tree_links(tree.numpy().astype(np.int64), b, n), strict=True):
        out.copy_(links)


def _assign(requests: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, new: Tensor, width: int) -> None:
    done = 0
    for r, a, e in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[r, a:e] = new[done : done + e - a]
        done += e - a


def _extend_slots(requests: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, out: Tensor, width: int) -> None:
    rows = [slots[r, a:e] for r, a, e in zip(requests, starts, ends, strict=True)]
    every = torch.cat(rows)
    out[: len(every)] = every


def _accepted_slots(index: Tensor, slots: Tensor, out: Tensor) -> None:
    taken = slots[index[index >= 0].long()]
    out[: len(taken)] = taken


def _verify(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """From the root on, to the child that the model would have said."""
    n = candidates.shape[1]
    for b in range(len(candidates)):
        node, taken = 0, [0]
        while True:
            said, child = target_predict[b, node], int(retrive_next_token[b, node])
            predicts[b * n + node] = said
            while child >= 0 and candidates[b, child] != said:
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            node = child
            taken.append(node)
        accept_token_num[b] = len(taken) - 1
        accept_index[b, : len(taken)] = retrive_index[b, taken].to(accept_index.dtype)


def _move(pointers: Tensor, strides: Tensor, to: Tensor, of: Tensor) -> None:
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + i * stride, stride) for i in of.tolist()]
        for i, row in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(pointer + i * stride, row, stride)


def _draft_slots(
    requests: Tensor, slots: Tensor, lens: Tensor, out: Tensor, width: int, topk: int, columns: int
) -> None:
    rows = [slots[r, n : n + topk * columns] for r, n in zip(requests, lens, strict=True)]
    out.copy_(torch.cat(rows))


def _bonus_tokens(accepted: Tensor, lens: Tensor, out: Tensor, width: int) -> None:
    out.copy_(accepted.view(-1, width).gather(1, lens[:, None].long() - 1)[:, 0])


def _tree(
    parents: Tensor,
    chosen: Tensor,
    lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    following: Tensor,
    sibling: Tensor,
    topk: int,
    depth: int,
    n: int,
    mode: int,
) -> None:
    """Of the best n - 1 of all candidates, by their numbers; candidate c came from parents[c // topk], or the root."""
    assert mode == spec_tree.TreeMaskMode.QLEN_ONLY
    b = len(lens)
    tree = torch.eye(n, dtype=torch.bool).repeat(b, 1, 1)
    tree[:, :, 0] = True
    for seen, own, from_ in zip(tree, chosen.tolist(), parents.tolist(), strict=True):
        for i, c in enumerate(own, 1):
            if c // topk:
                seen[i] |= seen[own.index(from_[c // topk]) + 1]
    mask[: tree.numel()] = tree.flatten()
    _reconstruct(tree, lens, positions, index, following, sibling, b, n)
