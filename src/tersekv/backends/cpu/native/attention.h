// Attention of a work item: query rows of a request over a range of its keys, tile by tile, KV head by KV head.
// Mask, softmax and rescale: `step`; combine: `attention_run.h`; no copies to wait for, only prefetches.
#pragma once

#include "key_lists.h"
#include "tiles.h"
#include "small_m.h"
#include "row_transform.h"
#include "probabilities.h"

namespace {

// A work tile, done by one thread: rows [row, row + rows) of a request's drafts × group, of KV heads
// [head, head + heads), over the keys [begin, end) of a set.
struct WorkItem {
    int64_t request, set, row, rows, head, heads, begin, end;
    int64_t first_key;  // keys before it are masked for all rows, and not read: `begin` may be a split's
    bool small_m;  // uses `small_m.h`
    int64_t state;  // index of its split's partial state; -1: not split
    int64_t combine;
};

// With lists, each row is a request, or the heads of a row that share a list.
struct Request {
    int64_t keys, row, rows;  // rows of q from `row` on
    int64_t head, heads;
    int64_t table_row, last;  // lists: row of the page tables, or −1; the row's own position
    int64_t extra_keys;       // of the second set
};

inline bool has_lists(const Attention& c) { return c.sets[0].lists.entries.tensor >= 0; }

inline KeyList key_list_of_request(const Attention& c, Addresses at, const Request& r, int64_t i_set) {
    const KeySet& s = c.sets[i_set];
    bool slots = s.page_table.tensor < 0, known = slots || r.table_row >= 0;
    int64_t room = saturating_product(slots ? s.num_pages : s.max_pages, s.page_size);
    return KeyList(s, at, r.row, r.head, known && !slots ? r.table_row : 0, known ? (s.lists.causal ? r.last : room - 1) : -1);
}

// Returns the window of a request's rows; 0 if it holds all keys, so that numbers computed from it stay small.
inline int64_t window_or_zero_if_all(const Attention& c, int64_t keys) { return c.window < keys ? c.window : 0; }

// Returns whether items multiply their acc_o by the scale of their own values: not all values have one.
inline bool scales_own_values(const Attention& c) { return c.new_keys.codes.tensor >= 0 || c.num_sets > 1; }

inline float load_scale_or_host_value(const Scale& s, Addresses at, int64_t head) {
    return s.tensor < 0 ? static_cast<float>(s.value) : load<float>(at[s.tensor] + 4 * head * s.stride);
}

// Packs query row `row`, rotated like the cached keys if `apply_transform`. Returns the sum of its columns. bf16 pairs are
// exact: they are used for queries of at most 8 significant bits.
template <class Packing>
float pack_query_and_return_sum(const Attention& c, const KeySet& keys, Addresses at, int64_t row, int64_t head, bool apply_transform, uint32_t* out) {
    float x[MAX_TRANSFORMED_COLUMNS], sum = 0.0f;
    int64_t size = c.query_dtype == F32 ? 4 : c.query_dtype == E4M3 || c.query_dtype == E5M2 ? 1 : 2;
    for (int64_t i = 0; i < keys.num_keys; i++) {
        const PagedMatrix& m = keys.keys[i];
        const char* p = at[m.query.tensor] + row * m.query.strides[0] + head * m.query.strides[1] + m.query_column * size;
        if (apply_transform && is_transformed(c.key_transform)) {
            read_floats(p, c.query_dtype, x, m.columns);
            scale_and_rotate_query(c.key_transform, at, head / c.group, x, m.columns);
            for (int64_t j = 0; j < m.columns; j += Packing::VALUES) *out++ = pack_word(Packing(), x + j);
            for (int64_t j = 0; j < m.columns; j++) sum += x[j];
            continue;
        }
        for (int64_t begin = 0; begin < m.columns; begin += 64) {
            int64_t n = m.columns - begin < 64 ? m.columns - begin : 64;
            read_floats(p + begin * size, c.query_dtype, x, n);
            for (int64_t j = 0; j < n; j += Packing::VALUES) *out++ = pack_word(Packing(), x + j);
            for (int64_t j = 0; j < n; j++) sum += x[j];
        }
    }
    return sum;
}

inline float unpack_value(Fp32Packing, const uint32_t* values, int64_t stride, int64_t t, int64_t c) {
    return from_bits(values[t * stride + c]);
}
#if HAS_BF16_PRODUCTS
inline float unpack_value(Bf16Packing, const uint32_t* values, int64_t stride, int64_t t, int64_t c) {
    uint32_t x = values[t / 2 * stride + c];
    return from_bits(t % 2 ? x & 0xFFFF0000 : x << 16);
}
#endif

template <class Packing>
struct AttentionItem {
    const Attention& c;
    Addresses at;
    Tiles<Packing> tiles;
    const KeySet& set;
    // Row offsets of this tile and the next (two buffers), head 0, in each tensor.
    enum Read { KEYS, MORE_KEYS, VALUES, MORE_VALUES, KEY_SCALES, VALUE_SCALES, NUM_READS };
    int64_t offset[2][NUM_READS][BLOCK_N];
    RowPrefetcher ahead[NUM_READS];
    // The current source of keys and values: pages, or the unquantized new rows.
    const PagedMatrix *keys, *values;
    bool in_pages;

    AttentionItem(const Attention& call, Addresses addresses, const WorkItem& item)
        : c(call), at(addresses), tiles(call, item.small_m), set(call.sets[item.set]) {}

    // Computes the state of all rows of an item, head by head.
    void attend_work_item_into_state(const WorkItem& item, const Request& request, const State& state) {
        MaskArgs mask_args = mask_args_of(request);
        int64_t all_rows = item.heads * item.rows;
        memset(state.values, 0, all_rows * state.stride * sizeof(float));
        for (int64_t i = 0; i < all_rows; i++) state.softmax[i] = {NEGATIVE_INFINITY, 0.0f};
        WorkItem old = item, fresh = item;
        if (c.new_keys.codes.tensor >= 0) {
            int64_t first = mask_args.first > item.begin ? mask_args.first : item.begin;
            old.end = fresh.begin = first < item.end ? first : item.end;
        }
        keys = set.keys, values = set.values, in_pages = true;
        pack_queries(item, request);
        mainloop(old, request, mask_args, state);
        for (int64_t i = 0; i < all_rows; i++) restore_order_and_unrotate_acc(item.head + i / item.rows, state.values + i * state.stride);
        if (!scales_own_values(c)) return;
        for (int64_t i = 0; i < all_rows; i++)
            scale_acc_and_clear_p_sums(state.values + i * state.stride, load_scale_or_host_value(set.v_scale, at, item.head + i / item.rows));
        if (c.new_keys.codes.tensor < 0) return;
        keys = &c.new_keys, values = &c.new_values, in_pages = false;
        if (is_transformed(c.key_transform)) pack_queries(item, request);
        mainloop(fresh, request, mask_args, state);
    }

    MaskArgs mask_args_of(const Request& r) const {
        const char* mask = c.mask.tensor < 0 ? nullptr : at[c.mask.tensor] + r.row * c.mask.stride;
        return {r.keys, r.keys - r.rows, window_or_zero_if_all(c, r.keys), mask, c.mask.stride};
    }

private:
    // Finishes acc_o over the pages: columns back in order, rotation and channel scales of V undone.
    void restore_order_and_unrotate_acc(int64_t head, float* row) const {
        if constexpr (Packing::VALUES == 2)
            if (tiles.small_m) restore_output_column_order_small_m(Packing(), set.values[0].dtype, set.values[0].columns, row);
        unrotate_and_scale_output(c.value_transform, at, head, row, value_columns(set));
    }

    // Applies the scale of cached values, since new rows have none, and clears the sums of |P|.
    void scale_acc_and_clear_p_sums(float* row, float by) const {
        for (int64_t j = 0; j < tiles.state_stride; j += W)
            store(row + j, j < tiles.value_stride ? load<VecF>(row + j) * by : VecF{});
    }

    // Main loop over the item's key tiles in the current source, all heads per tile.
    void mainloop(const WorkItem& item, const Request& request, const MaskArgs& mask_args, const State& state) {
        int64_t buffer = 0, k = item.begin, begin = k, count = find_row_offsets_and_return_count(item, request, k, buffer);
        while (count > 0) {
            int64_t next_begin = k, next = find_row_offsets_and_return_count(item, request, k, buffer ^ 1);
            TilePosition position = {begin, count, next, buffer, ahead};
            for (int64_t h = 0; h < item.heads; h++) {
                for (int read = 0; read < NUM_READS; read++) ahead[read] = prefetcher_of_next_tile_part(item, read, h, position);
                State part = {state.values + h * item.rows * state.stride, state.softmax + h * item.rows, state.stride};
                attend_tile(item, mask_args, position, h, part);
            }
            begin = next_begin, count = next, buffer ^= 1;
        }
    }

    // The first key of this tile, keys in it and in the next, the half of `offset` for this one, and the prefetchers.
    struct TilePosition {
        int64_t begin, count, next, buffer;
        RowPrefetcher* ahead;
    };

    // Packs the queries, rotated for pages, or unrotated for new rows.
    void pack_queries(const WorkItem& item, const Request& request) {
        for (int64_t h = 0; h < item.heads; h++) pack_queries_of_head(item, request, h);
    }

    void pack_queries_of_head(const WorkItem& item, const Request& request, int64_t h) {
        uint32_t* out = queries_of(item, h);
        if (tiles.small_m) memset(out, 0, MAX_SMALL_M * tiles.query_row_words * 4);
        for (int64_t m = 0; m < item.rows; m++) {
            int64_t r = item.row + m, row = request.row + r / c.group, head = (item.head + h) * c.group + r % c.group;
            float& sum = tiles.query_sums[h * item.rows + m];
            if (!tiles.small_m) {
                sum = pack_query_and_return_sum<Packing>(c, set, at, row, head, in_pages, out + m * tiles.query_row_words);
            } else if constexpr (Packing::VALUES == 2) {
                const StridedTensor& q = set.keys[0].query;
                sum = pack_query_small_m_and_return_sum(Packing(), at[q.tensor] + row * q.strides[0] + head * q.strides[1], c.query_dtype,
                                   set.keys[0].columns, set.keys[0].dtype, out + m * tiles.query_row_words);
            }
        }
    }

    uint32_t* queries_of(const WorkItem& item, int64_t h) const {
        return tiles.queries + h * (tiles.small_m ? MAX_SMALL_M : item.rows) * tiles.query_row_words;
    }

    // Finds the rows of the tile that begins at key k, and moves k behind it. Returns their number; 0: there are none left.
    int64_t find_row_offsets_and_return_count(const WorkItem& item, const Request& request, int64_t& k, int64_t buffer) {
        auto found = [&](int64_t t, int64_t page, int64_t slot) {
            for (int read = 0; read < NUM_READS; read++) {
                const StridedTensor& p = tensor_of(read);
                offset[buffer][read][t] = page * p.strides[0] + slot * p.strides[1];
            }
        };
        if (has_lists(c)) return key_list_of_request(c, at, request, item.set).visit_visible_keys_and_return_count(k, item.end, BLOCK_N, found);
        int64_t begin = k, count = item.end - k < BLOCK_N ? item.end - k : BLOCK_N;
        if (count <= 0) return 0;
        k += count;
        if (!in_pages) {
            int64_t row = request.row + begin - (request.keys - request.rows);
            for (int64_t t = 0; t < count; t++) found(t, row + t, 0);
            return count;
        }
        const char* table = at[set.page_table.tensor] + item.request * set.page_table.stride;
        int64_t key = begin < item.first_key ? item.first_key : begin;
        int64_t column = key / set.page_size, slot = key % set.page_size;
        int64_t page = read_index(table, set.page_table.dtype, column);
        for (int64_t t = 0; t < count; slot += begin + t >= item.first_key, t++) {
            if (slot == set.page_size) {
                slot = 0;
                page = read_index(table, set.page_table.dtype, ++column);
            }
            found(t, page, slot);
        }
        return count;
    }

    const PagedMatrix& matrix_of(int read) const {
        switch (read) {
            case KEYS: case KEY_SCALES: return keys[0];
            case MORE_KEYS: return set.keys[1];
            case MORE_VALUES: return set.values[1];
            default: return values[0];
        }
    }

    const StridedTensor& tensor_of(int read) const { return read >= KEY_SCALES ? matrix_of(read).scales : matrix_of(read).codes; }

    // Address of head 0's part of the first row.
    const char* base_of(int read) const {
        const PagedMatrix& m = matrix_of(read);
        return read >= KEY_SCALES ? at[m.scales.tensor] : at[m.codes.tensor] + m.first_byte;
    }

    Rows rows_of(int read, int64_t head, const TilePosition& position) const {
        return {base_of(read) + head * tensor_of(read).strides[2], offset[position.buffer][read], position.count, position.ahead + read};
    }

    // Returns whether values are the keys' rows again, codes or scales: what was loaded as keys is there.
    bool is_latent() const { return values->codes.tensor == keys->codes.tensor; }

    // Returns the part of the next tile's rows, of all heads, to prefetch during this tile's head i_part.
    RowPrefetcher prefetcher_of_next_tile_part(const WorkItem& item, int read, int64_t i_part, const TilePosition& position) const {
        const StridedTensor& p = tensor_of(read);
        const PagedMatrix& m = matrix_of(read);
        bool of_values = read == VALUES || read == MORE_VALUES || read == VALUE_SCALES;
        bool there = read == MORE_KEYS ? in_pages && set.num_keys > 1 : read == MORE_VALUES ? in_pages && set.num_values > 1 : p.tensor >= 0;
        if (position.next == 0 || !there || (of_values && is_latent())) return {};
        int64_t row = m.columns * bits_of(m.dtype) / 8;
        if (read >= KEY_SCALES) row = m.columns / m.width * (m.scale_dtype == F32 ? 4 : 1);
        int64_t bytes = (item.heads - 1) * p.strides[2] + row;
        return {base_of(read) + item.head * p.strides[2], offset[position.buffer ^ 1][read], i_part * position.next / item.heads,
                (i_part + 1) * position.next / item.heads, 0, bytes};
    }

    void attend_tile(const WorkItem& item, const MaskArgs& mask_args, const TilePosition& position, int64_t h, const State& state) {
        int64_t head = item.head + h, k = position.begin, count = position.count, padded = round_up(count, W);
        // QK.
        tiles.small_m ? compute_scores_small_m(item, head, h, position) : compute_scores(item, head, h, position);
        int64_t first = item.row / c.group, last = (item.row + item.rows - 1) / c.group;
        bool unmasked = has_lists(c) || mask_args.all_visible(first, last, k, k + count);
        float factor = load_scale_or_host_value(c.softmax_scale, at, 0) * (in_pages ? load_scale_or_host_value(set.k_scale, at, head) : 1.0f);
        float cap = static_cast<float>(c.softcap);
        // Per row: scale, softcap, mask, online softmax, rescale of acc_o.
        for (int64_t m = 0; m < item.rows; m++) {
            float* s = tiles.scores + m * BLOCK_N;
            float by = cap ? factor : factor * LOG2E;
            for (int64_t t = 0; t < padded; t += W) store(s + t, load<VecF>(s + t) * by);
            if (cap) apply_softcap_times_log2e(s, padded, cap);
            if (!unmasked) apply_mask(s, mask_args, (item.row + m) / c.group, k, count);
            for (int64_t t = count; t < padded; t++) s[t] = NEGATIVE_INFINITY;
            float old = online_softmax_step(s, padded, state.softmax[m]);
            if (old != 1.0f) {
                float* acc = state.values + m * state.stride;
                for (int64_t i = 0; i < state.stride; i += W) store(acc + i, load<VecF>(acc + i) * old);
            }
        }
        // PV.
        accumulate_pv(item, head, position, unmasked, state);
    }

    // QK: scores [rows, BLOCK_N] of a tile, without per-tensor scales.
    void compute_scores(const WorkItem& item, int64_t head, int64_t h, const TilePosition& position) {
        Operands o = {};
        o.a = queries_of(item, h);
        o.a_stride = tiles.query_row_words;
        o.b_stride = BLOCK_N, o.c = tiles.scores, o.c_stride = BLOCK_N;
        for (int64_t i = 0; i < (in_pages ? set.num_keys : 1); i++) {
            const PagedMatrix& m = keys[i];
            pack_keys(Packing(), m.dtype, rows_of(i == 0 ? KEYS : MORE_KEYS, head, position), m.columns, tiles.keys);
            int64_t groups = m.width ? m.columns / m.width : 1;
            if (m.width) load_and_transpose_scales(m.scale_dtype, rows_of(KEY_SCALES, head, position), groups, tiles.scales);
            o.b = tiles.keys;
            o.depth = m.columns / groups / Packing::VALUES;
            for (int64_t g = 0; g < groups; g++, o.a += o.depth, o.b += o.depth * BLOCK_N, o.add = true) {
                o.factor = m.width ? tiles.scales + g * BLOCK_N : nullptr;
                multiply<Packing>(o, item.rows, round_up(position.count, W));
            }
            if (m.dtype == INT4) add_zero_point_terms_to_scores(item.rows, tiles.query_sums + h * item.rows, round_up(position.count, W));
        }
    }

    void compute_scores_small_m(const WorkItem& item, int64_t head, int64_t h, const TilePosition& position) {
        if constexpr (Packing::VALUES == 2) {
            const PagedMatrix& m = *keys;
            Rows scales = m.width ? rows_of(KEY_SCALES, head, position) : Rows{};
            scores_small_m(Packing(), m.dtype, rows_of(KEYS, head, position), scales, m.columns, queries_of(item, h),
                          item.rows, tiles.scores);
            if (!tiles.num_row_scales(m)) return;
            load_and_transpose_scales(m.scale_dtype, scales, 1, tiles.scales);
            for (int64_t r = 0; r < item.rows; r++)
                for (int64_t t = 0; t < round_up(position.count, W); t += W) {
                    float* s = tiles.scores + r * BLOCK_N + t;
                    store(s, load<VecF>(s) * load<VecF>(tiles.scales + t));
                }
            if (m.dtype == INT4) add_zero_point_terms_to_scores(item.rows, tiles.query_sums + h * item.rows, round_up(position.count, W));
        }
    }

    // Adds the zero points of a tile's keys to the scores: shift × scale × sum of the query, per key and row.
    void add_zero_point_terms_to_scores(int64_t num_rows, const float* query_sums, int64_t padded_keys) {
        for (int64_t t = 0; t < padded_keys; t += W) {
            VecF lacks = zero_point_shift(tiles.scales, t) * load<VecF>(tiles.scales + t);
            for (int64_t r = 0; r < num_rows; r++) {
                float* s = tiles.scores + r * BLOCK_N + t;
                store(s, fma(lacks, broadcast(query_sums[r]), load<VecF>(s)));
            }
        }
    }

    // Packs the zero-point shifts of a tile's values: exact, since they are small integers.
    void pack_zero_point_shifts(int64_t padded) {
        for (int64_t t = 0; t < padded; t += W) store(tiles.shifts + t, zero_point_shift(tiles.scales, t));
        float unused = 0.0f;
        pack_p_and_return_needs_residual(Packing(), reinterpret_cast<float*>(tiles.shifts), nullptr, padded, tiles.shifts, unused);
    }

    // PV: acc_o += P × values.
    void accumulate_pv(const WorkItem& item, int64_t head, const TilePosition& position, bool unmasked, const State& state) {
        int64_t column = 0, abs_p_sum = 0;
        for (int64_t i = 0; i < (in_pages ? set.num_values : 1); i++) {
            accumulate_pv_of_matrix(item, head, position, unmasked, state, i ? MORE_VALUES : VALUES, column, abs_p_sum);
            column += values[i].columns, abs_p_sum += tiles.num_p_sums(values[i]);
        }
    }

    // Columns of acc_o from `first_column` on, and sums of |P| from `first_abs_p_sum` on, belong to the matrix.
    void accumulate_pv_of_matrix(const WorkItem& item, int64_t head, const TilePosition& position, bool unmasked, const State& state,
                                 int read, int64_t first_column, int64_t first_abs_p_sum) {
        const PagedMatrix& m = matrix_of(read);
        int64_t count = position.count, padded = round_up(count, W);
        Rows rows = rows_of(read, head, position), by = m.width ? rows_of(VALUE_SCALES, head, position) : Rows{};
        // Integer codes are never NaN: a P of 0 is enough to mask a value.
        bool straight = tiles.small_m && (unmasked || m.dtype == INT8 || is_4_bit(m.dtype));
        if (!straight) pack_v_tile(m, rows);
        int64_t all_columns = tiles.small_m ? round_up(m.columns, 64) : m.columns;
        int64_t factored = tiles.num_row_scales(m), groups = factored ? factored : 1, columns = all_columns / groups;
        if (factored && !is_latent()) load_and_transpose_scales(m.scale_dtype, by, groups, tiles.scales);
        if (m.dtype == INT4) pack_zero_point_shifts(padded);
        bool finite = unmasked || straight || v_tile_is_finite(count, all_columns);
        Operands o = {};
        o.a = tiles.packed_p, o.a_stride = BLOCK_N / Packing::VALUES;
        o.b_stride = tiles.value_stride, o.c_stride = state.stride;
        o.depth = (count + Packing::VALUES - 1) / Packing::VALUES;
        o.add = true;
        for (int64_t g = 0; g < groups; g++) {
            const float* scales = factored ? tiles.scales + g * BLOCK_N : nullptr;
            if (!finite) {
                accumulate_pv_skipping_zero_p(item.rows, count, scales, g * columns, columns, first_column, first_abs_p_sum + g, state);
                continue;
            }
            bool shows = false, row_shows[MAX_BLOCK_M];
            for (int64_t r = 0; r < item.rows; r++)
                shows |= row_shows[r] = pack_p_and_return_needs_residual(Packing(), tiles.scores + r * BLOCK_N, scales, padded,
                                               tiles.packed_p + r * o.a_stride, abs_p_sums_of_row(state, r)[first_abs_p_sum + g]);
            o.b = tiles.values + g * columns;
            o.c = state.values + first_column + g * columns;
            auto add = [&](bool rest) {
                // With P as rounded, so that its rounding error multiplies (code - zero point).
                float lacks[MAX_BLOCK_M];
                for (int64_t r = 0; m.dtype == INT4 && r < item.rows; r++) {
                    lacks[r] = dot(Packing(), tiles.packed_p + r * o.a_stride, tiles.shifts, padded);
                    float* x = o.c + r * o.c_stride;
                    for (int64_t i = 0; !straight && i < round_up(columns, W); i += W) store(x + i, load<VecF>(x + i) + lacks[r]);
                }
                if (!straight) return multiply<Packing>(o, item.rows, groups == 1 ? round_up(columns, W) : columns);
                if constexpr (Packing::VALUES == 2)
                    accumulate_pv_small_m(Packing(), m.dtype, rows, by, m.columns, {tiles.packed_p, tiles.scores, rest, lacks}, item.rows,
                                  o.c, o.c_stride);
            };
            add(false);
            if (!shows) continue;
            for (int64_t r = 0; r < item.rows; r++) {
                uint32_t* p = tiles.packed_p + r * o.a_stride;
                if (c.prefill_invariant && !row_shows[r]) memset(p, 0, o.a_stride * sizeof(uint32_t));
                else pack_p_residual(Packing(), tiles.scores + r * BLOCK_N, scales, padded, p);
            }
            add(true);
        }
    }

    void pack_v_tile(const PagedMatrix& m, const Rows& rows) {
        if (!tiles.small_m) return pack_values(Packing(), m.dtype, rows, m.columns, tiles.values, tiles.value_stride);
        if constexpr (Packing::VALUES == 2)
            unpack_values_small_m(Packing(), m.dtype, rows, m.columns, tiles.values, tiles.value_stride);
    }

    float* abs_p_sums_of_row(const State& state, int64_t row) const { return state.values + row * state.stride + tiles.value_stride; }

    bool v_tile_is_finite(int64_t count, int64_t columns) const {
        VecI wrong = {};
        for (int64_t t = 0; t < count; t += Packing::VALUES)
            for (int64_t i = 0; i < columns; i += W) {
                VecI x = load<VecI>(tiles.values + t / Packing::VALUES * tiles.value_stride + i);
                VecI inside = i + W <= columns ? ~VecI{} : lanes_below(columns - i);
                wrong |= inside & ((x & INFINITE) == broadcast(static_cast<int32_t>(INFINITE)));
                if (Packing::VALUES == 2) wrong |= inside & (((x << 16) & INFINITE) == broadcast(static_cast<int32_t>(INFINITE)));
            }
        for (int i = 0; i < W; i++)
            if (wrong[i]) return false;
        return true;
    }

    static VecI lanes_below(int64_t n) {
        VecI x;
        for (int i = 0; i < W; i++) x[i] = i < n ? -1 : 0;
        return x;
    }

    // PV of a tile with masked keys and non-finite values: skips values with P = 0, even if NaN.
    void accumulate_pv_skipping_zero_p(int64_t num_rows, int64_t num_keys, const float* scales, int64_t v_column,
                                       int64_t num_columns, int64_t first_acc_column, int64_t i_abs_p_sum, const State& state) {
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t t = 0; t < num_keys; t++) {
                float p = tiles.scores[r * BLOCK_N + t];
                if (p == 0.0f) continue;
                if (scales != nullptr) p *= scales[t];
                abs_p_sums_of_row(state, r)[i_abs_p_sum] += p < 0 ? -p : p;
                float* acc = state.values + r * state.stride + first_acc_column + v_column;
                for (int64_t i = 0; i < num_columns; i++)
                    acc[i] += p * unpack_value(Packing(), tiles.values, tiles.value_stride, t, v_column + i);
            }
    }
};

}  // namespace
