// The interface between Python and the kernels: plain structures of numbers, filled in by records.py, whose classes
// have the same fields in the same order (loading the library compares `tersekv_sizes`). Tensors are passed as a list
// of addresses; a record holds an index into it, or -1 for no tensor. Strides are in bytes.
#pragma once

#include <stdint.h>

// Encoding of a tensor's numbers, or of a format's codes. INT4: x ≈ (code - zero point) * scale, the zero point in the
// four lowest bits of the scale.
enum Dtype : int64_t { F32, BF16, F16, E4M3, E5M2, INT8, E2M1, INT4, I32, I64, U32, E8M0 };

// Granularity of a scale.
enum ScaleKind : int64_t { NO_SCALE, TENSOR_SCALE, ROW_SCALE, BLOCK_SCALE, GROUP_SCALE, UE8M0_SCALE, INDEX_SCALE };

// An index tensor: [n], or [n, m] with the stride of the first dimension.
struct IndexTensor {
    int64_t tensor, dtype, stride;
};

// A tensor and the strides of three dimensions, [page, slot, head] or [token, head, -].
struct StridedTensor {
    int64_t tensor, strides[3];
};

// LayerNorm of rows: tensors of any float dtype, or -1 for none.
struct LayerNorm {
    int64_t weight, bias, weight_dtype, bias_dtype;
    double epsilon;
};

// Weights of an indexer's heads [token, head]; without `input` ones, without `out` none are written.
struct HeadWeights {
    StridedTensor input, out;
    int64_t dtype;
    double scale;
};

// A number, or a tensor that overrides it; `stride` from head to head.
struct Scale {
    double value;
    int64_t tensor, stride;
};

// A paged tensor that attention reads: codes, and a scale for every `width` columns of a row (0: no scales).
struct PagedMatrix {
    StridedTensor codes;
    int64_t first_byte;  // of a row's codes
    int64_t dtype, columns;
    StridedTensor scales;
    int64_t width, scale_dtype;
    StridedTensor query;  // keys only: the query columns multiplied with these, from `query_column` on
    int64_t query_column;
};

// Lists of keys of each row. An entry is `block` consecutive positions of the row's request, or a slot where there is no
// page table; negative: none.
struct KeyLists {
    StridedTensor entries, lens;  // [token, head, entry]; [token, head]: used entries, or none: all
    int64_t dtype, lens_dtype, length, heads, block;
    int64_t causal;  // positions past a row's own are not seen
};

// Keys and values of a cache; those of `keys` side by side make up a key, and likewise a value.
struct KeySet {
    int64_t num_keys, num_values;
    PagedMatrix keys[2], values[2];
    IndexTensor page_table;
    int64_t max_pages, num_pages, page_size;
    Scale k_scale, v_scale;
    KeyLists lists;
};

// Transform of stored rows: Hadamard rotation in blocks of `block` columns (0: none) with `signs`, and `channels`
// scales, `stride` from head to head; tensors, or -1.
struct RowTransform {
    int64_t signs, block, channels, stride;
};

struct Attention {
    int64_t num_sets;  // of keys, in one softmax; two only with lists
    KeySet sets[2];
    PagedMatrix new_keys, new_values;  // [token, -, head]: the new tokens' unquantized rows, or none
    IndexTensor seq_lens, cu_seqlens_q;
    int64_t requests, rows, heads, group, max_q_len;
    int64_t query_dtype;
    IndexTensor mask;
    int64_t window, sinks;
    StridedTensor out, lse, max_logits;
    int64_t out_dtype, lse_of_keys;  // lse without the sinks
    double softcap;
    Scale softmax_scale, out_scale;
    RowTransform key_transform, value_transform;
    int64_t batch_invariant;  // keys of a request are split by its own length alone
    int64_t prefill_invariant;  // and at fixed positions; rows do not depend on each other
};

// Rows of one or two tensors side by side, cast or quantized, to a cache or to a tensor [token, head].
struct RowWrite {
    StridedTensor first, second;  // [token, head]
    int64_t first_columns, second_columns, rotated, heads;
    int64_t cached;  // `out` is [page, slot, head]; else [token, head]
    StridedTensor out;
    int64_t out_dtype, scale_kind;
    StridedTensor scales;  // stored beside the codes
    int64_t width;                // columns of a scale: UE8M0_SCALE, INDEX_SCALE
    int64_t stored_scales, tail;  // UE8M0_SCALE: scales of a row; last columns, kept in bf16
    Scale multiplier;
    RowTransform transform;
    LayerNorm norm;
    int64_t rotary_column;  // the first that is rotated
    int64_t round_dtype;    // rows are rounded to after norm, RoPE and transform; F32: they are not
    HeadWeights weights;    // `out`: `input` * scale * the row's stored scale
};

struct Append {
    int64_t num_row_writes;
    RowWrite row_writes[4];
    int64_t tokens, dtype, page_size, num_pages;
    IndexTensor slots, batch, kv_positions, indptr, indices;
    int64_t num_requests, num_indices;
    int64_t cos_sin, cos_sin_stride, max_position, rotary;
    IndexTensor positions;
    int64_t interleaved, zero_padding, scales_quantize;
    int64_t widen;  // INT4: the range of a row is widened to include 0
};

struct Merge {
    int64_t parts, rows, heads, columns, dtype, out_dtype;
    int64_t outs, outs_strides[3], lses, lses_strides[3];
    StridedTensor out, lse;
};

// Scores of an indexer, or what is taken of them if `select`.
struct IndexScores {
    PagedMatrix keys;  // its query: [token, head]; width: columns of a stored scale
    IndexTensor page_table, seq_lens, cu_seqlens_q;
    int64_t requests, rows, heads, max_q_len, max_pages, num_pages, page_size;
    int64_t query_dtype;
    StridedTensor weights;  // [token, head] fp32, or none
    int64_t ratio, relu, each, block, width;
    double scale;
    StridedTensor out, lens;  // [token, head, -]: scores, or columns and how many they are
    IndexTensor starts, ends;  // [token]: the first key that a row sees; where its keys end, in place of its position
    int64_t select, k, keep_first, keep_last, open_group;
};

struct IndexTopk {
    int64_t rows, lines, width, columns;
    StridedTensor scores;  // [token, head, -]
    IndexTensor visible, open_group;
    IndexTensor starts;  // the first column that a row sees, from which columns are counted; `visible` is where they end
    StridedTensor out, lens;
    int64_t k, keep_first, keep_last;
};

// Fault in the values of an index tensor, and its request; `values` go into the error message.
enum Fault : int64_t {
    NO_FAULT, TOO_LONG, ROWS_OUTSIDE, TOO_MANY_ROWS, PAGE_OUTSIDE, NO_MEMORY, PREFIX_TOO_LONG, TOO_MANY_KEYS,
    ENTRY_OUTSIDE, POSITION_OUTSIDE, LISTED_PAGE_OUTSIDE,  // of lists: `request` is the set, `at` row, head, entry
};
struct Report {
    int64_t fault, request, values[2], at[3];
};

using Addresses = char* const*;

// The kernels compiled for one instruction set.
struct Kernels {
    const char* name;
    void (*attention)(const Attention&, Addresses, int64_t threads, Report&);
    void (*append)(const Append&, Addresses, int64_t threads);
    void (*merge)(const Merge&, Addresses, int64_t threads);
    void (*index_scores)(const IndexScores&, Addresses, int64_t threads, Report&);
    void (*index_topk)(const IndexTopk&, Addresses, int64_t threads);
};
