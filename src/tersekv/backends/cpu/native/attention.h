// Attention of some rows of a request over a range of its keys, tile by tile, KV head by KV head.
#pragma once

#include "softmax.h"
#include "few.h"
#include "turn.h"
#include "weights.h"

namespace {

constexpr int64_t MOST_ROWS = 64;  // query rows of a KV head that are attended together
constexpr int64_t MOST_FEW = 8;    // … by `few.h`

// What one thread does at once: rows [row, row + rows) of a request's drafts × group, on KV heads [head, head + heads),
// over the keys [begin, end).
struct Item {
    int64_t request, row, rows, head, heads, begin, end;
    bool few;  // by `few.h`
    int64_t state;  // its place among the states of pieces that are joined; -1: it is whole
    int64_t join;
};

// The state of `count` rows: weighted values [count, stride], and a maximum and a sum for each. Behind a row's values
// comes, for each factor of a value, the sum of the weights, of which a key that weighs much is known.
struct State {
    float* values;
    Running* running;
    int64_t stride;
};

struct Request {
    int64_t keys, row, rows;  // rows of q from `row` on
};

// The window of a request's rows: one that holds all of its keys is none, so that what is computed from it stays small.
inline int64_t window_of(const Attention& c, int64_t keys) { return c.window < keys ? c.window : 0; }

// The sizes of an item's tiles, in units of four bytes, and its memory. They depend on the call alone.
template <class Unit>
struct Tiles {
    bool few;  // rows: of `few.h`
    int64_t query_units, value_columns, value_stride, state_stride, key_factors, value_factors;
    uint32_t *queries, *keys, *values, *weights, *shifts;
    float *scores, *factors, *query_sums;
    State own;

    // Factors of a row; few rows meet those of e2m1 in their own way.
    int64_t groups(const Matrix& m) const { return m.width && !(few && m.dtype == E2M1) ? m.columns / m.width : 0; }

    Tiles(const Attention& c, bool few_rows) : few(few_rows), query_units(0), key_factors(0) {
        int64_t step = few ? 64 : 16;
        for (int64_t i = 0; i < c.num_keys; i++) {
            query_units += (few ? up(c.keys[i].columns, step) : c.keys[i].columns) / Unit::VALUES;
            key_factors = groups(c.keys[i]) > key_factors ? groups(c.keys[i]) : key_factors;
        }
        value_stride = up(c.values.columns, step);
        value_columns = few ? value_stride : c.values.columns;
        value_factors = groups(c.values);
        state_stride = value_stride + up(value_factors > 1 ? value_factors : 1, 16);
    }

    // Lays everything out in `memory`, if there is any; returns the bytes it takes. An item has `heads` of `rows` each.
    size_t lay_out(char* memory, int64_t heads, int64_t rows) {
        int64_t most = heads * (few ? MOST_FEW : rows);
        size_t p = 0;
        auto take = [&p, memory](int64_t units) {
            size_t start = p;
            p += up(units * 4, 64);
            return memory == nullptr ? nullptr : memory + start;
        };
        queries = reinterpret_cast<uint32_t*>(take(most * query_units));
        keys = reinterpret_cast<uint32_t*>(take(query_units * TILE));
        values = reinterpret_cast<uint32_t*>(take(TILE / Unit::VALUES * value_stride));
        weights = reinterpret_cast<uint32_t*>(take(MOST_ROWS * TILE / Unit::VALUES));
        scores = reinterpret_cast<float*>(take(MOST_ROWS * TILE));
        factors = reinterpret_cast<float*>(take((key_factors > value_factors ? key_factors : value_factors) * TILE));
        query_sums = reinterpret_cast<float*>(take(most));
        shifts = reinterpret_cast<uint32_t*>(take(TILE));
        own.values = reinterpret_cast<float*>(take(most * state_stride));
        own.running = reinterpret_cast<Running*>(take(most * 2));
        own.stride = state_stride;
        return p;
    }
};

inline float number(const Scale& s, Addresses at, int64_t head) {
    return s.tensor < 0 ? static_cast<float>(s.value) : load<float>(at[s.tensor] + 4 * head * s.stride);
}

// Row `row` of the queries, as units, turned as cached keys are or not. In pairs it is exact: they are for queries of at
// most 8 significant bits. Returns their sum.
template <class Unit>
float pack_query(const Attention& c, Addresses at, int64_t row, int64_t head, bool turned, uint32_t* out) {
    float x[LONGEST_TURN], sum = 0.0f;
    for (int64_t i = 0; i < c.num_keys; i++) {
        const Matrix& m = c.keys[i];
        const char* p = at[m.query.tensor] + row * m.query.strides[0] + head * m.query.strides[1];
        if (turned && turns(c.key_turn)) {
            read_floats(p, c.query_dtype, x, m.columns);
            turn_query(c.key_turn, at, head / c.group, x, m.columns);
            for (int64_t j = 0; j < m.columns; j += Unit::VALUES) *out++ = unit_of(Unit(), x + j);
            for (int64_t j = 0; j < m.columns; j++) sum += x[j];
            continue;
        }
        int64_t size = c.query_dtype == F32 ? 4 : c.query_dtype == E4M3 || c.query_dtype == E5M2 ? 1 : 2;
        for (int64_t begin = 0; begin < m.columns; begin += 64) {
            int64_t n = m.columns - begin < 64 ? m.columns - begin : 64;
            read_floats(p + begin * size, c.query_dtype, x, n);
            for (int64_t j = 0; j < n; j += Unit::VALUES) *out++ = unit_of(Unit(), x + j);
            for (int64_t j = 0; j < n; j++) sum += x[j];
        }
    }
    return sum;
}

inline float value_of_unit(Floats, const uint32_t* values, int64_t stride, int64_t t, int64_t c) {
    return from_bits(values[t * stride + c]);
}
#if HAS_PAIRS
inline float value_of_unit(Pairs, const uint32_t* values, int64_t stride, int64_t t, int64_t c) {
    uint32_t x = values[t / 2 * stride + c];
    return from_bits(t % 2 ? x & 0xFFFF0000 : x << 16);
}
#endif

template <class Unit>
struct Attend {
    const Attention& c;
    Addresses at;
    Tiles<Unit> tiles;
    // Offsets of the rows of this tile and of the next one, head 0, in each tensor that is read.
    enum Read { KEYS, ROTARY, VALUES, KEY_FACTORS, VALUE_FACTORS, READS };
    int64_t offset[2][READS][TILE];
    Ahead ahead[READS];
    // What is attended to now: pages, or the new tokens' own rows.
    const Matrix *keys, *values;
    bool in_pages;

    Attend(const Attention& call, Addresses addresses, bool few) : c(call), at(addresses), tiles(call, few) {}

    // Attends the rows of an item; `state` is that of all its rows, head by head.
    void run(const Item& item, const Request& request, const State& state) {
        Sight sight = sight_of(request);
        int64_t all_rows = item.heads * item.rows;
        memset(state.values, 0, all_rows * state.stride * sizeof(float));
        for (int64_t i = 0; i < all_rows; i++) state.running[i] = {NEGATIVE_INFINITY, 0.0f};
        Item old = item, fresh = item;
        if (c.new_keys.codes.tensor >= 0) {
            int64_t first = sight.first > item.begin ? sight.first : item.begin;
            old.end = fresh.begin = first < item.end ? first : item.end;
        }
        keys = c.keys, values = &c.values, in_pages = true;
        pack_queries(item, request);
        sweep(old, request, sight, state);
        for (int64_t i = 0; i < all_rows; i++) settle(item.head + i / item.rows, state.values + i * state.stride);
        if (c.new_keys.codes.tensor < 0) return;
        for (int64_t i = 0; i < all_rows; i++)
            scale_values(state.values + i * state.stride, number(c.v_scale, at, item.head + i / item.rows));
        keys = &c.new_keys, values = &c.new_values, in_pages = false;
        if (turns(c.key_turn)) pack_queries(item, request);
        sweep(fresh, request, sight, state);
    }

    Sight sight_of(const Request& r) const {
        const char* mask = c.mask.tensor < 0 ? nullptr : at[c.mask.tensor] + r.row * c.mask.stride;
        return {r.keys, r.keys - r.rows, window_of(c, r.keys), mask, c.mask.stride};
    }

private:
    // Weighted values of a KV head as they are meant: in the order of columns, turned back.
    void settle(int64_t head, float* row) const {
        if constexpr (Unit::VALUES == 2)
            if (tiles.few) columns_of_few(Unit(), c.values.dtype, c.values.columns, row);
        turn_back(c.value_turn, at, head, row, c.values.columns);
    }

    // The new rows have a factor of their own. What weights were summed to is forgotten: they are rounded anew.
    void scale_values(float* row, float by) const {
        for (int64_t j = 0; j < tiles.state_stride; j += W)
            store(row + j, j < tiles.value_stride ? load<VecF>(row + j) * by : VecF{});
    }

    // Attends to the keys of an item that lie where `keys` and `values` say.
    void sweep(const Item& item, const Request& request, const Sight& sight, const State& state) {
        int64_t which = 0;
        if (item.begin < item.end) locate(item, request, item.begin, which);
        for (int64_t k = item.begin; k < item.end; k += TILE, which ^= 1) {
            Now now = {tile_at(item, k), tile_at(item, k + TILE), which, ahead};
            if (now.next > 0) locate(item, request, k + TILE, which ^ 1);
            for (int64_t h = 0; h < item.heads; h++) {
                for (int read = 0; read < READS; read++) ahead[read] = share(item, read, h, now);
                State part = {state.values + h * item.rows * state.stride, state.running + h * item.rows, state.stride};
                step(item, sight, k, now, h, part);
            }
        }
    }

    static int64_t tile_at(const Item& item, int64_t k) {
        int64_t left = item.end - k;
        return left < 0 ? 0 : left < TILE ? left : TILE;
    }

    // Keys of this tile and of the next one, which half of `offset` is this one's, and what to ask for meanwhile.
    struct Now {
        int64_t count, next, which;
        Ahead* ahead;
    };

    // Queries as pages have them, or as they are.
    void pack_queries(const Item& item, const Request& request) {
        for (int64_t h = 0; h < item.heads; h++) pack_queries(item, request, h);
    }

    void pack_queries(const Item& item, const Request& request, int64_t h) {
        uint32_t* out = queries_of(item, h);
        if (tiles.few) memset(out, 0, MOST_FEW * tiles.query_units * 4);
        for (int64_t m = 0; m < item.rows; m++) {
            int64_t r = item.row + m, row = request.row + r / c.group, head = (item.head + h) * c.group + r % c.group;
            float& sum = tiles.query_sums[h * item.rows + m];
            if (!tiles.few) {
                sum = pack_query<Unit>(c, at, row, head, in_pages, out + m * tiles.query_units);
            } else if constexpr (Unit::VALUES == 2) {
                const Place& q = c.keys[0].query;
                sum = query_of_few(Unit(), at[q.tensor] + row * q.strides[0] + head * q.strides[1], c.query_dtype,
                                   c.keys[0].columns, c.keys[0].dtype, out + m * tiles.query_units);
            }
        }
    }

    uint32_t* queries_of(const Item& item, int64_t h) const {
        return tiles.queries + h * (tiles.few ? MOST_FEW : item.rows) * tiles.query_units;
    }

    void locate(const Item& item, const Request& request, int64_t k, int64_t which) {
        if (!in_pages) {
            int64_t row = request.row + k - (request.keys - request.rows);
            for (int64_t t = 0; t < tile_at(item, k); t++) {
                offset[which][KEYS][t] = (row + t) * keys->codes.strides[0];
                offset[which][VALUES][t] = (row + t) * values->codes.strides[0];
            }
            return;
        }
        const char* table = at[c.page_table.tensor] + item.request * c.page_table.stride;
        int64_t count = tile_at(item, k), column = k / c.page_size, slot = k % c.page_size;
        int64_t page = read_index(table, c.page_table.dtype, column);
        for (int64_t t = 0; t < count; t++, slot++) {
            if (slot == c.page_size) {
                slot = 0;
                page = read_index(table, c.page_table.dtype, ++column);
            }
            for (int read = 0; read < READS; read++) {
                const Place& p = place_of(read);
                offset[which][read][t] = page * p.strides[0] + slot * p.strides[1];
            }
        }
    }

    const Place& place_of(int read) const {
        switch (read) {
            case KEYS: return keys->codes;
            case ROTARY: return c.keys[1].codes;
            case VALUES: return values->codes;
            case KEY_FACTORS: return keys->factors;
            default: return values->factors;
        }
    }

    Rows rows_of(int read, int64_t head, const Now& now) const {
        const Place& p = place_of(read);
        return {at[p.tensor] + head * p.strides[2], offset[now.which][read], now.count, now.ahead + read};
    }

    // The rows of the next tile that are asked for while this one's h-th head is computed, of all heads.
    Ahead share(const Item& item, int read, int64_t h, const Now& now) const {
        const Place& p = place_of(read);
        const Matrix& m = read == ROTARY ? c.keys[1] : read == VALUES || read == VALUE_FACTORS ? *values : *keys;
        bool latent = read == VALUES && p.tensor == keys->codes.tensor;  // they are there as keys
        if (now.next == 0 || p.tensor < 0 || latent || (read == ROTARY && (c.num_keys == 1 || !in_pages))) return {};
        int64_t row = m.columns * bits_of(m.dtype) / 8;
        if (read >= KEY_FACTORS) row = m.columns / m.width * (m.factor_dtype == F32 ? 4 : 1);
        int64_t bytes = (item.heads - 1) * p.strides[2] + row;
        return {at[p.tensor] + item.head * p.strides[2], offset[now.which ^ 1][read], h * now.next / item.heads,
                (h + 1) * now.next / item.heads, 0, bytes};
    }

    void step(const Item& item, const Sight& sight, int64_t k, const Now& now, int64_t h, const State& state) {
        int64_t head = item.head + h, count = now.count, padded = up(count, W);
        tiles.few ? score_few(item, head, h, now) : score(item, head, h, now);
        int64_t first = item.row / c.group, last = (item.row + item.rows - 1) / c.group;
        bool whole = sight.whole(first, last, k, k + count);
        float factor = number(c.softmax_scale, at, 0) * (in_pages ? number(c.k_scale, at, head) : 1.0f);
        float cap = static_cast<float>(c.softcap);
        for (int64_t m = 0; m < item.rows; m++) {
            float* s = tiles.scores + m * TILE;
            float by = cap ? factor : factor * LOG2E;
            for (int64_t t = 0; t < padded; t += W) store(s + t, load<VecF>(s + t) * by);
            if (cap) bend(s, padded, cap);
            if (!whole) hide(s, sight, (item.row + m) / c.group, k, count);
            for (int64_t t = count; t < padded; t++) s[t] = NEGATIVE_INFINITY;
            float old = advance(s, padded, state.running[m]);
            if (old != 1.0f) {
                float* acc = state.values + m * state.stride;
                for (int64_t i = 0; i < state.stride; i += W) store(acc + i, load<VecF>(acc + i) * old);
            }
        }
        weigh(item, head, now, whole, state);
    }

    // scores [rows, TILE] of a tile, without the scales of the tensor.
    void score(const Item& item, int64_t head, int64_t h, const Now& now) {
        Operands o = {};
        o.a = queries_of(item, h);
        o.a_stride = tiles.query_units;
        o.b_stride = TILE, o.c = tiles.scores, o.c_stride = TILE;
        for (int64_t i = 0; i < (in_pages ? c.num_keys : 1); i++) {
            const Matrix& m = keys[i];
            pack_keys(Unit(), m.dtype, rows_of(i == 0 ? KEYS : ROTARY, head, now), m.columns, tiles.keys);
            int64_t groups = m.width ? m.columns / m.width : 1;
            if (m.width) read_factors(m.factor_dtype, rows_of(KEY_FACTORS, head, now), groups, tiles.factors);
            o.b = tiles.keys;
            o.depth = m.columns / groups / Unit::VALUES;
            for (int64_t g = 0; g < groups; g++, o.a += o.depth, o.b += o.depth * TILE, o.add = true) {
                o.factor = m.width ? tiles.factors + g * TILE : nullptr;
                multiply<Unit>(o, item.rows, up(now.count, W));
            }
            if (m.dtype == INT4) lift(item.rows, tiles.query_sums + h * item.rows, up(now.count, W));
        }
    }

    void score_few(const Item& item, int64_t head, int64_t h, const Now& now) {
        if constexpr (Unit::VALUES == 2) {
            const Matrix& m = *keys;
            Rows factors = m.width ? rows_of(KEY_FACTORS, head, now) : Rows{};
            scores_of_few(Unit(), m.dtype, rows_of(KEYS, head, now), factors, m.columns, queries_of(item, h),
                          item.rows, tiles.scores);
            if (!tiles.groups(m)) return;
            read_factors(m.factor_dtype, factors, 1, tiles.factors);
            for (int64_t r = 0; r < item.rows; r++)
                for (int64_t t = 0; t < up(now.count, W); t += W) {
                    float* s = tiles.scores + r * TILE + t;
                    store(s, load<VecF>(s) * load<VecF>(tiles.factors + t));
                }
            if (m.dtype == INT4) lift(item.rows, tiles.query_sums + h * item.rows, up(now.count, W));
        }
    }

    // The zero points of a tile's keys: once a key and row, its shift times the sum of the query.
    void lift(int64_t rows, const float* sums, int64_t padded) {
        for (int64_t t = 0; t < padded; t += W) {
            VecF lacks = shift_at(tiles.factors, t) * load<VecF>(tiles.factors + t);
            for (int64_t r = 0; r < rows; r++) {
                float* s = tiles.scores + r * TILE + t;
                store(s, fma(lacks, all(sums[r]), load<VecF>(s)));
            }
        }
    }

    // The zero points of a tile's values, as units: exact, since they are whole and small.
    void pack_shifts(int64_t padded) {
        for (int64_t t = 0; t < padded; t += W) store(tiles.shifts + t, shift_at(tiles.factors, t));
        float unused = 0.0f;
        pack_weights(Unit(), reinterpret_cast<float*>(tiles.shifts), nullptr, padded, tiles.shifts, unused);
    }

    // Adds probabilities × values to the state.
    void weigh(const Item& item, int64_t head, const Now& now, bool whole, const State& state) {
        const Matrix& m = *values;
        int64_t count = now.count, padded = up(count, W);
        Rows rows = rows_of(VALUES, head, now), by = m.width ? rows_of(VALUE_FACTORS, head, now) : Rows{};
        // A value that no row sees weighs 0 with its factor: of whole numbers that is enough.
        bool straight = tiles.few && (whole || m.dtype == INT8 || nibbles(m.dtype));
        if (!straight) pack(rows);
        int64_t factored = tiles.groups(m), groups = factored ? factored : 1, columns = tiles.value_columns / groups;
        if (factored) read_factors(m.factor_dtype, by, groups, tiles.factors);
        if (m.dtype == INT4) pack_shifts(padded);
        bool finite = whole || straight || all_finite(count);
        Operands o = {};
        o.a = tiles.weights, o.a_stride = TILE / Unit::VALUES;
        o.b_stride = tiles.value_stride, o.c_stride = state.stride;
        o.depth = (count + Unit::VALUES - 1) / Unit::VALUES;
        o.add = true;
        for (int64_t g = 0; g < groups; g++) {
            const float* factors = factored ? tiles.factors + g * TILE : nullptr;
            if (!finite) {
                weigh_seen(item.rows, count, factors, g, columns, state);
                continue;
            }
            bool shows = false;
            for (int64_t r = 0; r < item.rows; r++)
                shows |= pack_weights(Unit(), tiles.scores + r * TILE, factors, padded, tiles.weights + r * o.a_stride,
                                      sums_of(state, r)[g]);
            o.b = tiles.values + g * columns;
            o.c = state.values + g * columns;
            auto add = [&](bool rest) {
                // By the weights as they are rounded, so that what is lost of one meets its code less the zero point.
                float lacks[MOST_ROWS];
                for (int64_t r = 0; m.dtype == INT4 && r < item.rows; r++) {
                    lacks[r] = dot(Unit(), tiles.weights + r * o.a_stride, tiles.shifts, padded);
                    float* x = o.c + r * o.c_stride;
                    for (int64_t i = 0; !straight && i < up(columns, W); i += W) store(x + i, load<VecF>(x + i) + lacks[r]);
                }
                if (!straight) return multiply<Unit>(o, item.rows, groups == 1 ? up(columns, W) : columns);
                if constexpr (Unit::VALUES == 2)
                    values_of_few(Unit(), m.dtype, rows, by, m.columns, {tiles.weights, tiles.scores, rest, lacks}, item.rows,
                                  o.c, o.c_stride);
            };
            add(false);
            if (!shows) continue;
            for (int64_t r = 0; r < item.rows; r++)
                pack_rest(Unit(), tiles.scores + r * TILE, factors, padded, tiles.weights + r * o.a_stride);
            add(true);
        }
    }

    void pack(const Rows& rows) {
        const Matrix& m = *values;
        if (!tiles.few) return pack_values(Unit(), m.dtype, rows, m.columns, tiles.values, tiles.value_stride);
        if constexpr (Unit::VALUES == 2)
            pairs_of_few(Unit(), m.dtype, rows, m.columns, tiles.values, tiles.value_stride);
    }

    float* sums_of(const State& state, int64_t row) const { return state.values + row * state.stride + tiles.value_stride; }

    bool all_finite(int64_t count) const {
        VecI wrong = {};
        for (int64_t t = 0; t < count; t += Unit::VALUES)
            for (int64_t i = 0; i < tiles.value_columns; i += W) {
                VecI x = load<VecI>(tiles.values + t / Unit::VALUES * tiles.value_stride + i);
                VecI inside = i + W <= tiles.value_columns ? ~VecI{} : lanes_below(tiles.value_columns - i);
                wrong |= inside & ((x & INFINITE) == all(static_cast<int32_t>(INFINITE)));
                if (Unit::VALUES == 2) wrong |= inside & (((x << 16) & INFINITE) == all(static_cast<int32_t>(INFINITE)));
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

    // In a tile that not every row sees all of, a value that is not seen weighs nothing, even if NaN.
    void weigh_seen(int64_t rows, int64_t count, const float* factors, int64_t g, int64_t columns, const State& state) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t t = 0; t < count; t++) {
                float p = tiles.scores[r * TILE + t];
                if (p == 0.0f) continue;
                if (factors != nullptr) p *= factors[t];
                sums_of(state, r)[g] += p < 0 ? -p : p;
                float* acc = state.values + r * state.stride + g * columns;
                for (int64_t i = 0; i < columns; i++)
                    acc[i] += p * value_of_unit(Unit(), tiles.values, tiles.value_stride, t, g * columns + i);
            }
    }
};

}  // namespace
