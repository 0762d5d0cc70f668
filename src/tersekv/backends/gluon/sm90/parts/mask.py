"""The mask: which keys are visible to which query rows. Decode's by keys and tokens, prefill's by a row's last key."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class MaskArgs(NamedTuple):
    """Arguments of decode's mask: which keys are visible to a work tile's query rows."""

    num_keys: gl.tensor
    seqlen_q: gl.tensor  # of the request's query
    row_begin: gl.tensor  # the work tile's first row, all heads of a group counted
    q_begin: gl.tensor  # the request's first query row
    MASK: gl.tensor
    stride_mask_t: gl.tensor
    first_cut_key: gl.tensor  # by `load_first_cut_key`


@gluon.jit
def load_first_cut_key(SEQ_LENS, i_request, num_keys, cfg: gl.constexpr):
    """Returns the key from which on all pages of a request are the same cut one, or num_keys: one that is cut is the
    last, unless a list has it several times (`triton/parts/listed_pages`)."""
    if not cfg.LIST.AS_PAGES:
        return num_keys
    else:
        repeats = (gl.load(SEQ_LENS + i_request) >> 32).to(gl.int32)
        first = ((num_keys + cfg.PAGE - 1) // cfg.PAGE - 1 - repeats) * cfg.PAGE
        return gl.where(repeats > 0, first, num_keys)


@gluon.jit
def is_before_cut(o_n, mask_args, cfg: gl.constexpr):
    """Returns which keys do not lie behind the end of a cut page. All cut pages end where the last one does."""
    keys_of_cut_page = (mask_args.num_keys - 1) % cfg.PAGE + 1
    return (o_n < mask_args.first_cut_key) | (o_n % cfg.PAGE < keys_of_cut_page)


@gluon.jit
def is_visible(o_n, q_token, mask_args, cfg: gl.constexpr):
    """Returns which of the keys o_n the query tokens see; one of the two is a row, the other a column."""
    num_prefix_keys = mask_args.num_keys - mask_args.seqlen_q
    o_position = num_prefix_keys + q_token
    visible = o_n < mask_args.num_keys
    if cfg.HAS_MASK:
        draft = o_n - num_prefix_keys
        p_word = mask_args.MASK + (mask_args.q_begin + q_token).to(gl.int64) * mask_args.stride_mask_t + (draft >> 4)
        m_word = (draft >= 0) & visible & (q_token < mask_args.seqlen_q)
        word = gl.load(p_word, mask=m_word, other=0).to(gl.int32)
        bit = (word >> (draft & 15)) & 1
        visible = visible & ((draft < 0) | (bit == 1))
    else:
        visible = visible & (o_n <= o_position)
    if cfg.WINDOW > 0:
        visible = visible & (o_n > o_position - cfg.WINDOW)
    if cfg.LIST.AS_PAGES:
        visible = visible & is_before_cut(o_n, mask_args, cfg)
    return visible


@gluon.jit
def is_visible_in_block(n_block, mask_args, NUM_ROWS: gl.constexpr, LAYOUT: gl.constexpr, cfg: gl.constexpr):
    """Returns which of an n_block's keys each query row sees: [NUM_ROWS, BLOCK_N], in LAYOUT."""
    o_n = n_block * cfg.BLOCK_N + gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    q_token = (mask_args.row_begin + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, LAYOUT))) // cfg.GROUP
    return is_visible(o_n[None, :], q_token[:, None], mask_args, cfg)


@gluon.jit
def keys_visible_to_any_row_mask(o_n, num_keys, seqlen_q, cfg: gl.constexpr):
    """Returns which keys some row may see; slots behind every row's window may have been freed, with their pages."""
    valid = o_n < num_keys
    if cfg.WINDOW > 0:
        valid = valid & (o_n > num_keys - seqlen_q - cfg.WINDOW)
    return valid


@gluon.jit
def keys_visible_to_any_row(o_n, mask_args, cfg: gl.constexpr):
    """Returns `keys_visible_to_any_row_mask`, without what lies behind the ends of cut pages."""
    valid = keys_visible_to_any_row_mask(o_n, mask_args.num_keys, mask_args.seqlen_q, cfg)
    if cfg.LIST.AS_PAGES:
        valid = valid & is_before_cut(o_n, mask_args, cfg)
    return valid


@gluon.jit
def unmasked_n_block_range(request, first_cut_key, cfg: gl.constexpr):
    """Returns n_blocks [unmasked_begin, unmasked_end) in which every row sees every key."""
    unmasked_begin = request.first_n_block
    if cfg.WINDOW > 0:
        unmasked_begin = (gl.maximum(request.num_keys - cfg.WINDOW, 0) + cfg.BLOCK_N - 1) // cfg.BLOCK_N
    num_unmasked_keys = request.num_keys - request.seqlen_q if cfg.HAS_MASK else request.num_keys - request.seqlen_q + 1
    if cfg.LIST.AS_PAGES:
        num_unmasked_keys = gl.minimum(num_unmasked_keys, first_cut_key)
    return unmasked_begin, gl.maximum(num_unmasked_keys, 0) // cfg.BLOCK_N


@gluon.jit
def apply_mask(s, last_causal_key_in_tile, key_begin_in_tile, key_end_in_tile, cfg: gl.constexpr):
    """Returns a tile of scores with −inf where a row does not see the key: prefill's, limits relative to the tile."""
    o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    visible = o_n[None, :] <= gl.minimum(last_causal_key_in_tile, key_end_in_tile - 1)[:, None]
    if cfg.WINDOW > 0:
        visible = visible & (o_n[None, :] > last_causal_key_in_tile[:, None] - cfg.WINDOW)
    if cfg.HAS_NEW_KV:  # rows before the first token see no key
        visible = visible & (o_n >= key_begin_in_tile)[None, :]
    return gl.where(visible, s, float("-inf"))
