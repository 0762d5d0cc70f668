"""Which kernel runs an attention: decode's, which split a request's keys, or prefill's, for many query rows."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

# Query rows per KV head: up to _MAX_DECODE_ROWS of a request decode's kernels read keys once; with less than
# _MIN_MEAN_ROWS on average the call is memory bound, and decode's kernels balance a request's keys over CTAs.
_MAX_DECODE_ROWS, _MIN_MEAN_ROWS = 64, 32


def select_attention_module_and_why_not(
    f: SimpleNamespace, decode_module: ModuleType, prefill_module: ModuleType
) -> tuple[ModuleType, str | None]:
    """Returns the module that runs these facts, and why it cannot (None: it can).

    Both compute the same where there is neither a mask nor new rows. decode_module has `why_not`; prefill_module also
    `prefers_decode`, which says whether decode's kernels are faster. With lists of keys, prefill's kernel attends to
    blocks that neighbouring rows share, and decode's to each row's own.
    """
    if f.indices is not None:
        by_rows = f.op == "decode" or f.batch_invariant or prefill_module.prefers_decode(f)
        module = decode_module if by_rows else prefill_module
        return module, module.why_not(f)
    if f.prefill_invariant:  # one kernel for few rows and for many
        return prefill_module, prefill_module.why_not(f)
    if f.op == "decode" and not _has_many_q_rows_per_request(f):
        return decode_module, decode_module.why_not(f)
    reason = prefill_module.why_not(f)
    if f.k is not None or f.batch_invariant:  # decode's kernels read no new rows, and split keys by the batch
        return prefill_module, reason
    if reason is None and not prefill_module.prefers_decode(f) and not _decode_reads_keys_once(f, decode_module):
        return prefill_module, None
    by_decode = decode_module.why_not(f)
    if by_decode is None or (reason is not None and f.op == "decode"):
        return decode_module, by_decode
    return prefill_module, None if reason is None else f"{reason}; of decode's kernels: {by_decode}"


def _has_many_q_rows_per_request(f: SimpleNamespace) -> bool:
    """Returns whether a decode has many query rows on average.

    max_q_len alone does not say: its bound may be T. Batch invariant calls have not, since the mean depends on the
    other requests.
    """
    if f.batch_invariant or f.mask is not None or not f.k_cache.shape[2]:
        return False
    tokens, requests = f.q.shape[0], f.seq_lens.shape[0]
    return tokens > requests and tokens * f.q.shape[1] // f.k_cache.shape[2] >= _MIN_MEAN_ROWS * requests


def _decode_reads_keys_once(f: SimpleNamespace, decode_module: ModuleType) -> bool:
    """Returns whether a call of `decode` has few enough rows that decode's kernels read each key once."""
    few = f.max_q_len * (f.q.shape[1] // f.k_cache.shape[2]) <= _MAX_DECODE_ROWS
    return f.op == "decode" and few and decode_module.why_not(f) is None
