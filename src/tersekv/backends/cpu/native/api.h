// The interface between Python and the kernels: plain structures of numbers, filled in by records.py, whose classes
// list the same fields in the same order (`tersekv_sizes` is compared when the library is loaded).
// Tensors come as a list of addresses; a record names one by its place in that list, or none by -1. Strides are in bytes.
#pragma once

#include <stdint.h>

// What the numbers of a tensor, or the codes of a format, are. INT4: x ≈ (code - zero point) * factor, the zero point in
// the four lowest bits of the factor.
enum Dtype : int64_t { F32, BF16, F16, E4M3, E5M2, INT8, E2M1, INT4, I32, I64, U32 };

// What a stored or given scale belongs to.
enum ScaleKind : int64_t { NO_SCALE, TENSOR_SCALE, ROW_SCALE, BLOCK_SCALE, GROUP_SCALE };

// An index tensor: [n], or [n, m] with a stride of the first dimension.
struct Indices {
    int64_t tensor, dtype, stride;
};

// Where something lies: a tensor and the strides of three dimensions, [page, slot, head] or [token, head, -].
struct Place {
    int64_t tensor, strides[3];
};

// A number, or a tensor that wins over it; `stride` from head to head.
struct Scale {
    double value;
    int64_t tensor, stride;
};

// A paged tensor that attention reads: codes, and a factor for every `width` columns of a row (0: no factors).
struct Matrix {
    Place codes;
    int64_t dtype, columns;
    Place factors;
    int64_t width, factor_dtype;
    Place query;  // keys only: the columns of the query that meet these
};

// What rows of a K/V cache lie turned by: `signs` of a rotation in blocks of so many columns, and the `channels`' scales,
// `stride` from head to head; tensors, or -1.
struct Turn {
    int64_t signs, block, channels, stride;
};

struct Attention {
    int64_t num_keys;  // matrices whose columns make up a key
    Matrix keys[2], values;
    Matrix new_keys, new_values;  // [token, -, head]: the new tokens' own rows, where they are given; not in pages then
    Indices page_table, seq_lens, cu_seqlens_q;
    int64_t requests, rows, heads, group, max_q_len, max_pages, num_pages, page_size;
    int64_t query_dtype;
    Indices mask;
    int64_t window, sinks;
    Place out, lse;
    int64_t out_dtype;
    double softcap;
    Scale softmax_scale, k_scale, v_scale, out_scale;
    Turn key_turn, value_turn;
    int64_t batch_invariant;  // keys of a request are cut by its own length alone
};

// Rows of one or two tensors side by side, cast or quantised, to a cache or to a tensor [token, head].
struct Stream {
    Place first, second;  // [token, head]
    int64_t first_columns, second_columns, rotated, heads;
    int64_t cached;  // `out` is [page, slot, head]; else [token, head]
    Place out;
    int64_t out_dtype, scale_kind;
    Place scales;  // stored beside the codes
    Scale multiplier;
    Turn turn;
};

struct Append {
    int64_t num_streams;
    Stream streams[4];
    int64_t tokens, dtype, page_size, num_pages;
    Indices slots, batch, kv_positions, indptr, indices;
    int64_t num_requests, num_indices;
    int64_t cos_sin, cos_sin_stride, max_position, rotary;
    Indices positions;
    int64_t interleaved, zero_padding, scales_quantize;
    int64_t widen;  // INT4: the range of a row is widened to hold 0
};

struct Merge {
    int64_t parts, rows, heads, columns, dtype, out_dtype;
    int64_t outs, outs_strides[3], lses, lses_strides[3];
    Place out, lse;
};

// What is wrong with a value of an index tensor, at which request; `values` are told in the message.
enum Fault : int64_t { NO_FAULT, TOO_LONG, ROWS_OUTSIDE, TOO_MANY_ROWS, PAGE_OUTSIDE, NO_MEMORY, PREFIX_TOO_LONG };
struct Report {
    int64_t fault, request, values[2];
};

using Addresses = char* const*;

// The kernels as compiled for one instruction set.
struct Kernels {
    const char* name;
    void (*attention)(const Attention&, Addresses, int64_t threads, Report&);
    void (*append)(const Append&, Addresses, int64_t threads);
    void (*merge)(const Merge&, Addresses, int64_t threads);
};
