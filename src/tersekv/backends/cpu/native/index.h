// An indexer's scores of cached keys, and the columns that are taken of them.
//
// Scores: rows of a request × a range of columns are an item; a tile of 64 keys is unpacked once for all its rows. A
// selection scores so many rows at a time as their scores fit into SCORES_AT_ONCE, then takes columns row by row.
#pragma once

#include "thread_pool.h"
#include "unpack_bf16.h"

namespace {

constexpr int64_t ITEM_KEYS = 1024, ITEM_ROWS = 64, SCORES_AT_ONCE = 8 << 20;  // of an item: keys; rows × heads

struct ScoreItem {
    int64_t row, rows, begin, end;  // columns [begin, end)
};

struct KeyRange {
    int64_t begin, end;
};

struct RowOfRequest {
    int64_t request, position, first, visible;  // keys [first, visible)
};

// Float keys in their order as integers: 0 is not to be taken, 1 NaN, the largest taken before all others.
inline uint32_t radix_key(float score, bool always_taken) {
    if (score == NEGATIVE_INFINITY) return 0;
    if (always_taken) return ~0u;
    if (score != score) return 1;
    uint32_t u = bits(score == 0.0f ? 0.0f : score);
    return u >> 31 ? ~u : u | 0x80000000;
}

// The columns of the k largest of `num_visible` scores, ascending, `open_group` behind them unless negative, then −1.
struct TopkSelection {
    int64_t k, first, last;  // first + last <= k

    TopkSelection(int64_t count, int64_t keep_first, int64_t keep_last) : k(count) {
        last = keep_last < k ? keep_last : k;
        first = keep_first < k - last ? keep_first : k - last;
    }

    // Returns the number of columns written, without the −1.
    int64_t store_topk_columns_and_return_count(const float* scores, int64_t num_visible, int64_t open_group_column, int32_t* out, int64_t out_columns) const {
        auto key = [&](int64_t j) { return radix_key(scores[j], j < first || j >= num_visible - last); };
        Candidates found;
        int64_t n = num_visible > SAMPLES ? collect_candidates_and_return_count(scores, num_visible, found) : -1, count;
        if (n >= 0) count = write_topk_of_keys_and_return_count(n, [&](int64_t i) { return found.keys[i]; }, [&](int64_t i) { return found.columns[i]; }, out);
        else count = write_topk_of_keys_and_return_count(num_visible, key, [](int64_t j) { return static_cast<int32_t>(j); }, out);
        if (open_group_column >= 0) out[count++] = static_cast<int32_t>(open_group_column);
        for (int64_t j = count; j < out_columns; j++) out[j] = -1;
        return count;
    }

private:
    static constexpr int64_t SAMPLES = 2048, MOST_CANDIDATES = 8192;

    // Columns whose keys reach a guess of the threshold, ascending.
    struct Candidates {
        uint32_t keys[MOST_CANDIDATES + W];
        int32_t columns[MOST_CANDIDATES + W];
        int64_t count = 0;

        // Appends those of num_lanes <= W columns from first_column on.
        void append_at_or_above(const uint32_t* vector_keys, uint32_t threshold_guess, int64_t first_column, int64_t num_lanes) {
#if defined(__AVX512F__)
            __m512i all = _mm512_loadu_si512(vector_keys);
            __mmask16 reached = _mm512_cmpge_epu32_mask(all, _mm512_set1_epi32(static_cast<int>(threshold_guess)));
            reached &= static_cast<__mmask16>((1u << num_lanes) - 1);
            if (reached == 0) return;
            __m512i at = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first_column)), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
            _mm512_storeu_si512(keys + count, _mm512_maskz_compress_epi32(reached, all));
            _mm512_storeu_si512(columns + count, _mm512_maskz_compress_epi32(reached, at));
            count += __builtin_popcount(reached);
#else
            for (int64_t i = 0; i < num_lanes; i++) {
                keys[count] = vector_keys[i], columns[count] = static_cast<int32_t>(first_column + i);
                count += vector_keys[i] >= threshold_guess;
            }
#endif
        }
    };

    // Returns the number of candidates, which hold all columns that are taken; −1 if the guess was too high or too low.
    int64_t collect_candidates_and_return_count(const float* scores, int64_t num_visible, Candidates& found) const {
        uint32_t guess = guess_threshold(scores, num_visible), x[W];
        int64_t kept_end = first < num_visible ? first : num_visible, middle = num_visible - last;
        for (int64_t j = 0, n; j < num_visible && found.count <= MOST_CANDIDATES - W; j += n) {
            int64_t end = j < kept_end ? kept_end : j < middle ? middle : num_visible;
            n = end - j < W ? end - j : W;
            bool kept = j < kept_end || j >= middle;
            if (n == W && !kept) radix_keys_of_vector(scores + j, x);
            else for (int64_t i = 0; i < n; i++) x[i] = radix_key(scores[j + i], kept);
            found.append_at_or_above(x, guess, j, n);
        }
        return found.count >= k && found.count <= MOST_CANDIDATES - W ? found.count : -1;
    }

    // `radix_key` of W columns.
    static void radix_keys_of_vector(const float* scores, uint32_t* out) {
        VecF score = load<VecF>(scores);
        VecU u = (VecU)(score == 0.0f ? VecF{} : score), key = (VecI)u < 0 ? ~u : u | 0x80000000u;
        key = score != score ? VecU{} + 1u : key;
        store(out, score == NEGATIVE_INFINITY ? VecU{} : key);
    }

    // Returns a number that somewhat more than k keys reach, judged by samples.
    uint32_t guess_threshold(const float* scores, int64_t num_visible) const {
        uint32_t counts[2048] = {};
        for (int64_t i = 0; i < SAMPLES; i++) counts[radix_key(scores[i * num_visible / SAMPLES], false) >> 21]++;
        int64_t rest = SAMPLES * k / num_visible * 5 / 4 + SAMPLES / 64, bin = 2047;
        while (bin > 0 && counts[bin] < rest) rest -= counts[bin--];
        return bin ? static_cast<uint32_t>(bin) << 21 : 1;
    }

    // Writes the columns that are taken of n, whose keys and columns the functions return. Returns their number.
    template <class Key, class Column>
    int64_t write_topk_of_keys_and_return_count(int64_t n, Key key_of, Column column_of, int32_t* columns_out) const {
        uint32_t threshold = 1;
        int64_t ties = n, count = 0;
        if (n > k) threshold = find_threshold_and_num_ties_taken(n, key_of, ties);
        for (int64_t i = 0; i < n; i++) {
            uint32_t x = key_of(i);
            if (x < threshold || (x == threshold && ties <= 0)) continue;
            ties -= x == threshold;
            columns_out[count++] = column_of(i);
        }
        return count;
    }

    // Returns the smallest key that is taken; num_ties_taken: how many of the keys equal to it are.
    template <class Key>
    uint32_t find_threshold_and_num_ties_taken(int64_t n, Key key_of, int64_t& num_ties_taken) const {
        static constexpr int SHIFTS[] = {21, 10, 0}, BITS[] = {11, 11, 10};
        uint32_t prefix = 0, mask = 0;
        int64_t rest = k;
        for (int pass = 0; pass < 3; pass++) {
            int64_t counts[2048] = {};
            uint32_t low = (1u << BITS[pass]) - 1;
            for (int64_t i = 0; i < n; i++) {
                uint32_t x = key_of(i);
                counts[x >> SHIFTS[pass] & low] += (x & mask) == prefix && x > 0;
            }
            int64_t bin = low;
            while (bin > 0 && counts[bin] < rest) rest -= counts[bin--];
            prefix |= static_cast<uint32_t>(bin) << SHIFTS[pass];
            mask |= low << SHIFTS[pass];
        }
        if (prefix == 0) return num_ties_taken = n, 1;  // fewer than k may be taken
        return num_ties_taken = rest, prefix;
    }
};

template <class Packing>
struct ScoreRun {
    const IndexScores& c;
    Addresses at;
    int64_t threads;
    Report& report;
    RowOfRequest* row_of;
    ScoreItem* items;
    int64_t num_items, lines, first_row, units;
    float* chunk;  // scores of rows from first_row on [rows, lines, width]; null: the call's own output
    bool no_memory;

    ScoreRun(const IndexScores& call, Addresses addresses, int64_t n, Report& r)
        : c(call), at(addresses), threads(n), report(r), first_row(0), units(call.keys.columns / Packing::VALUES), chunk(nullptr), no_memory(false) {}

    void score_all_rows_and_select_if_asked() {
        lines = c.each ? c.heads : 1;
        int64_t room = c.max_pages * c.page_size, tile = max_rows_of_item(), columns = max_columns_of_item();
        int64_t most = c.width * lines, step = c.select ? SCORES_AT_ONCE / (most > 1 ? most : 1) : c.rows;
        step = step < 1 ? 1 : step < c.rows ? step : c.rows;
        size_t row_bytes = round_up((c.rows + 1) * sizeof(RowOfRequest), 64);
        int64_t most_items = (step + c.requests + 2) * (c.width / columns + 2);
        char* p = cached_buffer(FOR_REQUESTS, row_bytes + most_items * sizeof(ScoreItem) + 64);
        if (p == nullptr) return fail_memory();
        row_of = reinterpret_cast<RowOfRequest*>(p);
        items = reinterpret_cast<ScoreItem*>(p + row_bytes);
        if (!read_and_check_requests(room)) return;
        if (c.select) {
            chunk = reinterpret_cast<float*>(cached_buffer(FOR_CALL, (step * most + 16) * sizeof(float)));
            if (chunk == nullptr) return fail_memory();
        }
        for (first_row = 0; first_row < c.rows; first_row += step) {
            int64_t end = first_row + step < c.rows ? first_row + step : c.rows;
            double work = plan_items_and_return_work(first_row, end, tile, columns);
            int64_t worth = work < (1 << 20) ? 1 : threads;
            parallel_for(num_items, worth, threads, score_item, this);
            if (__atomic_load_n(&no_memory, __ATOMIC_RELAXED)) return fail_memory();
            if (c.select) parallel_for((end - first_row) * lines, worth, threads, store_topk_of_computed_scores, this);
        }
    }

private:
    void fail_memory() { report.fault = NO_MEMORY; }

    bool report_fault(Fault fault, int64_t request, int64_t a, int64_t b) {
        report = {fault, request, {a, b}};
        return false;
    }

    int64_t max_rows_of_item() const { return c.heads < ITEM_ROWS ? ITEM_ROWS / c.heads : 1; }
    int64_t max_columns_of_item() const { return c.block < ITEM_KEYS ? ITEM_KEYS / c.block : 1; }

    // Reads and checks lengths, rows and pages.
    bool read_and_check_requests(int64_t max_keys) {
        for (int64_t t = 0; t < c.rows; t++) row_of[t] = {-1, -1, 0, 0};
        bool ragged = c.cu_seqlens_q.tensor >= 0;
        const char* starts = ragged ? at[c.cu_seqlens_q.tensor] : nullptr;
        for (int64_t b = 0; b < c.requests; b++) {
            int64_t tokens = read_index(at[c.seq_lens.tensor], c.seq_lens.dtype, b), keys = tokens / c.ratio;
            int64_t row = ragged ? read_index(starts, c.cu_seqlens_q.dtype, b) : b * c.max_q_len;
            int64_t stop = ragged ? read_index(starts, c.cu_seqlens_q.dtype, b + 1) : row + c.max_q_len;
            for (int64_t t = row; t < stop && c.ends.tensor >= 0; t++) {  // rows are checked to be of equal numbers
                int64_t end = read_index(at[c.ends.tensor], c.ends.dtype, t);
                keys = t == row || end > keys ? end : keys;
            }
            bool reads = keys > 0 && stop > row;
            if (reads && keys > max_keys) return report_fault(TOO_MANY_KEYS, b, max_keys, keys);
            if (stop > row && (row < 0 || stop > c.rows)) {
                if (reads) return report_fault(ROWS_OUTSIDE, b, row, stop);
                continue;
            }
            if (reads && stop - row > c.max_q_len) return report_fault(TOO_MANY_ROWS, b, stop - row, c.max_q_len);
            const char* table = at[c.page_table.tensor] + b * c.page_table.stride;
            for (int64_t i = 0; reads && i < (keys + c.page_size - 1) / c.page_size; i++) {
                int64_t page = read_index(table, c.page_table.dtype, i);
                if (page < 0 || page >= c.num_pages) return report_fault(PAGE_OUTSIDE, b, c.num_pages, page);
            }
            for (int64_t t = row; t < stop; t++) {
                int64_t position = tokens - (stop - t);
                position = position < -1 ? -1 : position;
                int64_t visible = (position + 1) / c.ratio, first = 0;
                if (c.ends.tensor >= 0) visible = read_index(at[c.ends.tensor], c.ends.dtype, t);
                if (c.starts.tensor >= 0) first = read_index(at[c.starts.tensor], c.starts.dtype, t);
                row_of[t] = {b, position, first < 0 ? 0 : first, visible < 0 ? 0 : visible};
            }
        }
        return true;
    }

    // Items of rows [begin, end). Returns their work in products.
    double plan_items_and_return_work(int64_t row_begin, int64_t row_end, int64_t max_rows, int64_t max_columns) {
        double work = 0;
        num_items = 0;
        for (int64_t t = row_begin; t < row_end;) {
            int64_t n = 1;
            while (n < max_rows && t + n < row_end && row_of[t + n].request == row_of[t].request) n++;
            int64_t seen = (keys_of_rows(t, n).end + c.block - 1) / c.block;
            seen = seen < c.width ? seen : c.width;
            int64_t from = 0;
            do {
                int64_t to = from + max_columns < seen ? from + max_columns : c.width;
                items[num_items++] = {t, n, from, to};
                from = to;
            } while (from < c.width);
            work += static_cast<double>(seen) * c.block * n * c.heads * c.keys.columns;
            t += n;
        }
        return work;
    }

    // Returns the keys that any of n rows sees lie in; begin >= end: none does.
    KeyRange keys_of_rows(int64_t row, int64_t n) const {
        KeyRange keys = {row_of[row].first, row_of[row].visible};
        for (int64_t t = row + 1; t < row + n; t++) {
            keys.begin = row_of[t].first < keys.begin ? row_of[t].first : keys.begin;
            keys.end = row_of[t].visible > keys.end ? row_of[t].visible : keys.end;
        }
        return keys;
    }

    float* score_row_ptr(int64_t row, int64_t line) const {
        if (chunk != nullptr) return chunk + ((row - first_row) * lines + line) * c.width;
        return reinterpret_cast<float*>(at[c.out.tensor] + row * c.out.strides[0] + line * c.out.strides[1]);
    }

    static void store_topk_of_computed_scores(void* context, int64_t i_row_and_head) {
        const ScoreRun& self = *static_cast<ScoreRun*>(context);
        const IndexScores& c = self.c;
        int64_t row = self.first_row + i_row_and_head / self.lines, line = i_row_and_head % self.lines;
        const RowOfRequest& r = self.row_of[row];
        int64_t visible = (r.visible + c.block - 1) / c.block;
        visible = visible < c.width ? visible : c.width;
        int64_t group = c.open_group && (r.position + 1) % c.ratio > 0 ? r.visible : -1;
        char* out = self.at[c.out.tensor] + row * c.out.strides[0] + line * c.out.strides[1];
        TopkSelection selection(c.k, c.keep_first, c.keep_last);
        int64_t n = selection.store_topk_columns_and_return_count(self.score_row_ptr(row, line), visible, group, reinterpret_cast<int32_t*>(out), c.k + c.open_group);
        store(self.at[c.lens.tensor] + row * c.lens.strides[0] + line * c.lens.strides[1], static_cast<int32_t>(n));
    }

    // Memory of an item.
    struct Tiles {
        uint32_t *queries, *keys;
        float *products, *scales, *weights;
        int64_t offset[2][BLOCK_N], scale_offset[BLOCK_N];
    };

    static void score_item(void* context, int64_t index) {
        ScoreRun& self = *static_cast<ScoreRun*>(context);
        const IndexScores& c = self.c;
        const ScoreItem& item = self.items[index];
        int64_t m = item.rows * c.heads;
        size_t floats = m * self.units + self.units * BLOCK_N + m * BLOCK_N + 2 * BLOCK_N + m + 5 * 16;
        char* p = cached_buffer(FOR_ITEM, floats * 4);
        if (p == nullptr) return __atomic_store_n(&self.no_memory, true, __ATOMIC_RELAXED);
        Tiles tiles;
        auto reserve = [&p](int64_t n) {
            char* start = p;
            p += round_up(n * 4, 64);
            return start;
        };
        tiles.queries = reinterpret_cast<uint32_t*>(reserve(m * self.units));
        tiles.keys = reinterpret_cast<uint32_t*>(reserve(self.units * BLOCK_N));
        tiles.products = reinterpret_cast<float*>(reserve(m * BLOCK_N));
        tiles.scales = reinterpret_cast<float*>(reserve(2 * BLOCK_N));
        tiles.weights = reinterpret_cast<float*>(reserve(m));
        self.score_keys_of_item(item, tiles);
    }

    void pack_queries_and_load_weights(const ScoreItem& item, const Tiles& tiles) const {
        const StridedTensor &q = c.keys.query, &w = c.weights;
        float x[256];
        uint32_t* out = tiles.queries;
        for (int64_t i = 0; i < item.rows * c.heads; i++) {
            int64_t row = item.row + i / c.heads, head = i % c.heads;
            read_floats(at[q.tensor] + row * q.strides[0] + head * q.strides[1], c.query_dtype, x, c.keys.columns);
            for (int64_t j = 0; j < c.keys.columns; j += Packing::VALUES) *out++ = pack_word(Packing(), x + j);
            tiles.weights[i] = w.tensor < 0 ? 1.0f : load<float>(at[w.tensor] + row * w.strides[0] + head * w.strides[1]);
        }
    }

    void find_row_offsets(const char* page_table_row, int64_t first_key, int64_t num_keys, const StridedTensor& tensor, int64_t* offsets_out) const {
        int64_t column = first_key / c.page_size, slot = first_key % c.page_size;
        int64_t page = num_keys > 0 ? read_index(page_table_row, c.page_table.dtype, column) : 0;
        for (int64_t t = 0; t < num_keys; t++, slot++) {
            if (slot == c.page_size) slot = 0, page = read_index(page_table_row, c.page_table.dtype, ++column);
            offsets_out[t] = page * tensor.strides[0] + slot * tensor.strides[1];
        }
    }

    void score_keys_of_item(const ScoreItem& item, Tiles& tiles) const {
        KeyRange seen = keys_of_rows(item.row, item.rows);
        int64_t begin = item.begin * c.block, end = saturating_product(item.end, c.block);
        begin = seen.begin > begin ? seen.begin : begin;
        end = seen.end < end ? seen.end : end;
        int64_t blocks = c.keys.scales.tensor < 0 ? 0 : (c.keys.columns + c.keys.width - 1) / c.keys.width;
        for (int64_t i = 0; i < item.rows; i++)
            for (int64_t line = 0; line < lines; line++)
                for (int64_t j = item.begin; j < item.end; j++) score_row_ptr(item.row + i, line)[j] = NEGATIVE_INFINITY;
        if (end <= begin) return;
        pack_queries_and_load_weights(item, tiles);
        const char* table = at[c.page_table.tensor] + row_of[item.row].request * c.page_table.stride;
        const char* base = at[c.keys.codes.tensor];
        find_row_offsets(table, begin, end - begin < BLOCK_N ? end - begin : BLOCK_N, c.keys.codes, tiles.offset[0]);
        int64_t bytes = c.keys.columns * (c.keys.dtype == E4M3 ? 1 : 2);
        for (int64_t key = begin, buffer = 0; key < end; key += BLOCK_N, buffer ^= 1) {
            int64_t count = end - key < BLOCK_N ? end - key : BLOCK_N, after = end - key - BLOCK_N;
            after = after < 0 ? 0 : after < BLOCK_N ? after : BLOCK_N;
            find_row_offsets(table, key + BLOCK_N, after, c.keys.codes, tiles.offset[buffer ^ 1]);
            RowPrefetcher ahead = {base, tiles.offset[buffer ^ 1], 0, after, 0, bytes}, none = {base, nullptr, 0, 0, 0, 1};
            pack_keys(Packing(), c.keys.dtype, Rows{base, tiles.offset[buffer], count, &ahead}, c.keys.columns, tiles.keys);
            if (blocks > 0) {
                find_row_offsets(table, key, count, c.keys.scales, tiles.scale_offset);
                load_and_transpose_scales(F32, Rows{at[c.keys.scales.tensor], tiles.scale_offset, count, &none}, blocks, tiles.scales);
            }
            compute_qk_tile(item, tiles, blocks);
            for (int64_t i = 0; i < item.rows; i++) reduce_heads_and_store_scores(item, tiles, i, key, count, blocks == 1);
        }
    }

    void compute_qk_tile(const ScoreItem& item, const Tiles& tiles, int64_t num_key_scale_blocks) const {
        int64_t step = num_key_scale_blocks > 1 ? c.keys.width / Packing::VALUES : units;
        for (int64_t begin = 0; begin < units; begin += step) {
            Operands o = {};
            o.a = tiles.queries + begin, o.a_stride = units;
            o.b = tiles.keys + begin * BLOCK_N, o.b_stride = BLOCK_N;
            o.c = tiles.products, o.c_stride = BLOCK_N;
            o.depth = units - begin < step ? units - begin : step;
            o.factor = num_key_scale_blocks > 1 ? tiles.scales + begin / step * BLOCK_N : nullptr;
            o.add = begin > 0;
            multiply<Packing>(o, item.rows * c.heads, BLOCK_N);
        }
    }

    // Scores of one row of an item of the tile's keys, to its lines.
    void reduce_heads_and_store_scores(const ScoreItem& item, const Tiles& tiles, int64_t i_row, int64_t first_key, int64_t num_keys, bool apply_key_scales) const {
        const RowOfRequest& r = row_of[item.row + i_row];
        int64_t seen = r.visible - first_key < num_keys ? r.visible - first_key : num_keys;
        int64_t unseen = r.first > first_key ? r.first - first_key : 0;
        if (seen <= unseen) return;
        float x[BLOCK_N], scale = static_cast<float>(c.scale);
        for (int64_t line = 0; line < lines; line++) {
            int64_t first = c.each ? line : 0, stop = c.each ? line + 1 : c.heads;
            for (int64_t v = 0; v < BLOCK_N; v += W) {
                VecF sum = {};
                for (int64_t h = first; h < stop; h++) {
                    VecF y = load<VecF>(tiles.products + (i_row * c.heads + h) * BLOCK_N + v);
                    if (c.relu) y = y < 0.0f ? VecF{} : y;  // a NaN stays
                    sum = h == first ? y * tiles.weights[i_row * c.heads + h] : fma(y, broadcast(tiles.weights[i_row * c.heads + h]), sum);
                }
                if (apply_key_scales) sum *= load<VecF>(tiles.scales + v);
                store(x + v, sum * scale);
            }
            float* out = score_row_ptr(item.row + i_row, line);
            if (c.block == 1) {
                memcpy(out + first_key + unseen, x + unseen, (seen - unseen) * sizeof(float));
                continue;
            }
            for (int64_t j = unseen; j < seen; j++) {
                float& best = out[(first_key + j) / c.block];
                bool starts_column = (first_key + j) % c.block == 0 || first_key + j == r.first;
                // The first key that is seen starts a column; then a number wins over NaN, and a larger one over it.
                best = starts_column ? x[j] : x[j] > best || (best != best && x[j] == x[j]) ? x[j] : best;
            }
        }
    }
};

void index_scores(const IndexScores& c, Addresses at, int64_t threads, Report& report) {
    report = {NO_FAULT, 0, {0, 0}};
#if HAS_BF16_PRODUCTS
    // Codes and bf16 numbers are exact in bf16.
    if (c.keys.dtype != F16 && c.query_dtype != F16) return ScoreRun<Bf16Packing>(c, at, threads, report).score_all_rows_and_select_if_asked();
#endif
    ScoreRun<Fp32Packing>(c, at, threads, report).score_all_rows_and_select_if_asked();
}

struct TopkRun {
    const IndexTopk& c;
    Addresses at;

    static void store_topk_of_given_scores(void* context, int64_t i_row_and_head) {
        const TopkRun& self = *static_cast<TopkRun*>(context);
        const IndexTopk& c = self.c;
        int64_t row = i_row_and_head / c.lines, line = i_row_and_head % c.lines;
        auto address = [&](const StridedTensor& x) { return self.at[x.tensor] + row * x.strides[0] + line * x.strides[1]; };
        int64_t columns = read_index(self.at[c.visible.tensor] + row * c.visible.stride, c.visible.dtype, 0);
        auto within_width = [&](int64_t column) { return column < 0 ? 0 : column < c.width ? column : c.width; };
        int64_t first = c.starts.tensor < 0 ? 0 : within_width(read_index(self.at[c.starts.tensor], c.starts.dtype, row));
        int64_t visible = within_width(columns) - first, group = -1;
        visible = visible < 0 ? 0 : visible;
        if (c.open_group.tensor >= 0 && *(self.at[c.open_group.tensor] + row * c.open_group.stride)) group = columns;
        TopkSelection selection(c.k, c.keep_first, c.keep_last);
        int64_t n = selection.store_topk_columns_and_return_count(reinterpret_cast<const float*>(address(c.scores)) + first, visible, group,
                           reinterpret_cast<int32_t*>(address(c.out)), c.columns);
        if (c.lens.tensor >= 0) store(address(c.lens), static_cast<int32_t>(n));
    }
};

void index_topk(const IndexTopk& c, Addresses at, int64_t threads) {
    TopkRun run = {c, at};
    int64_t lines = c.rows * c.lines;
    parallel_for(lines, lines * c.width < (1 << 16) ? 1 : threads, threads, TopkRun::store_topk_of_given_scores, &run);
}

}  // namespace
