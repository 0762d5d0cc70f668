// The tiles of a work item: their sizes and memory, and the softmax state of its rows.
#pragma once

#include "online_softmax.h"

namespace {

constexpr int64_t MAX_BLOCK_M = 64;  // query rows of a KV head in one work item
constexpr int64_t MAX_SMALL_M = 8;    // … with `small_m.h`

// Softmax state of rows: acc_o [rows, stride], and a row_max and row_sum for each. Behind a row's acc_o, one sum of |P|
// per scale of a value: the reference for `pack_p_and_return_needs_residual`'s test of rounding errors.
struct State {
    float* values;
    SoftmaxState* softmax;
    int64_t stride;
};

inline int64_t value_columns(const KeySet& s) { return s.values[0].columns + (s.num_values > 1 ? s.values[1].columns : 0); }

// Sizes of a work item's tiles, in words of four bytes, and their memory. They depend on the call alone.
template <class Packing>
struct Tiles {
    bool small_m;  // the layout of `small_m.h`
    int64_t query_row_words, value_stride, state_stride, max_scales_per_row;
    uint32_t *queries, *keys, *values, *packed_p, *shifts;
    float *scores, *scales, *query_sums;
    State item_state;

    // Returns the scales per row; 0 where small_m applies e2m1's block scales itself.
    int64_t num_row_scales(const PagedMatrix& m) const { return m.width && !(small_m && m.dtype == E2M1) ? m.columns / m.width : 0; }

    int64_t num_p_sums(const PagedMatrix& m) const { return num_row_scales(m) ? num_row_scales(m) : 1; }

    // Sets have the same columns. The states of a request's items have one stride, whatever their tiles.
    Tiles(const Attention& c, bool is_small_m) : small_m(is_small_m), query_row_words(0), max_scales_per_row(1) {
        int64_t step = small_m ? 64 : 16, most_sums = 1;
        for (int64_t i = 0; i < c.sets[0].num_keys; i++)
            query_row_words += (small_m ? round_up(c.sets[0].keys[i].columns, step) : c.sets[0].keys[i].columns) / Packing::VALUES;
        for (int64_t i = 0; i < c.num_sets; i++) {
            int64_t keys = num_row_scales(c.sets[i].keys[0]), values = num_row_scales(c.sets[i].values[0]), sums = 0;
            max_scales_per_row = keys > max_scales_per_row ? keys : max_scales_per_row;
            max_scales_per_row = values > max_scales_per_row ? values : max_scales_per_row;
            for (int64_t j = 0; j < c.sets[i].num_values; j++) sums += num_p_sums(c.sets[i].values[j]);
            most_sums = sums > most_sums ? sums : most_sums;
        }
        value_stride = round_up(value_columns(c.sets[0]), c.num_sets > 1 ? 64 : step);
        state_stride = value_stride + round_up(most_sums, 16);
    }

    // Places all tiles in `memory_or_null`, unless null. Returns the bytes needed by an item of `heads` with `rows` each.
    size_t lay_out_and_return_bytes(char* memory_or_null, int64_t heads, int64_t rows) {
        int64_t most = heads * (small_m ? MAX_SMALL_M : rows);
        size_t p = 0;
        auto reserve = [&p, memory_or_null](int64_t units) {
            size_t start = p;
            p += round_up(units * 4, 64);
            return memory_or_null == nullptr ? nullptr : memory_or_null + start;
        };
        queries = reinterpret_cast<uint32_t*>(reserve(most * query_row_words));
        keys = reinterpret_cast<uint32_t*>(reserve(query_row_words * BLOCK_N));
        values = reinterpret_cast<uint32_t*>(reserve(BLOCK_N / Packing::VALUES * value_stride));
        packed_p = reinterpret_cast<uint32_t*>(reserve(MAX_BLOCK_M * BLOCK_N / Packing::VALUES));
        scores = reinterpret_cast<float*>(reserve(MAX_BLOCK_M * BLOCK_N));
        scales = reinterpret_cast<float*>(reserve(max_scales_per_row * BLOCK_N));
        query_sums = reinterpret_cast<float*>(reserve(most));
        shifts = reinterpret_cast<uint32_t*>(reserve(BLOCK_N));
        item_state.values = reinterpret_cast<float*>(reserve(most * state_stride));
        item_state.softmax = reinterpret_cast<SoftmaxState*>(reserve(most * 2));
        item_state.stride = state_stride;
        return p;
    }
};

}  // namespace
