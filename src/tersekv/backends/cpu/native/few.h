// Attention of few rows, in pairs of bf16 numbers, straight from rows of codes: with so few, a tile of keys that must be
// transposed, and a tile of values that must be stored, would take longer than the products.
//
// A score is summed over a vector of columns first; sixteen of them are added up together. Codes of 4 bits take so little
// room that they are transposed first instead, before they are unpacked (nibbles.h). Pairs of two tokens' values are made
// in registers and multiplied there. Columns come in the order in which unpacking leaves them, 64 at a time: queries are
// laid out in that order, and outputs are put back from theirs.
#pragma once

#include "nibbles.h"

#if HAS_PAIRS
namespace {

// Of the i-th of 64 columns of keys, and of values: which column it is.
constexpr int64_t key_order(int64_t dtype, int64_t i) {
    int64_t chunk = i / 8;
    if (dtype == BF16) return i;
    return nibbles(dtype) ? chunk * 8 + i % 8 / 2 + i % 2 * 4 : chunk % 4 * 16 + chunk / 4 * 8 + i % 8;
}
constexpr int64_t value_order(int64_t dtype, int64_t i) {
    int64_t v = i / 16, lane = i % 16 / 4, j = i % 4;
    if (dtype == BF16) return v / 2 * 32 + lane * 8 + v % 2 * 4 + j;
    return nibbles(dtype) ? j * 16 + lane * 4 + v : lane * 16 + v * 4 + j;
}

struct Two {
    __m512i first, second;
};

INLINE Two unpacked(const Look& x) { return {_mm512_unpacklo_epi8(x.low, x.high), _mm512_unpackhi_epi8(x.low, x.high)}; }

// Codes of 64 columns from column c on, as bf16 numbers; past the row's end they are 0 and are not read.
template <int64_t DTYPE>
struct Codes {
    static constexpr int64_t LINES = bits_of(DTYPE) / 8;  // cache lines of 64 columns; 0: a half
    const Table<nibbles(DTYPE) || DTYPE == BF16 ? E4M3 : DTYPE> table;
    const Nibble<nibbles(DTYPE) ? DTYPE : INT4> nibble;
    const int64_t columns;
    int64_t byte = 0;
    __mmask64 inside[2] = {};

    explicit Codes(int64_t n) : columns(n) {}

    void at(int64_t c) {
        byte = c * bits_of(DTYPE) / 8;
        for (int i = 0; i < 2; i++) inside[i] = first_bytes(columns * bits_of(DTYPE) / 8 - byte - 64 * i);
    }

    INLINE Two keys(const uint8_t* row, __mmask64 there = ~0ull) const {
        __m512i x = _mm512_maskz_loadu_epi8(inside[0] & there, row + byte);
        if constexpr (DTYPE == BF16) return {x, _mm512_maskz_loadu_epi8(inside[1] & there, row + byte + 64)};
        else return unpacked(table(x));
    }

    // Pairs of tokens t and t + 1; past the last token they are 0, or any number of 4 bits.
    INLINE void values(const Rows& rows, int64_t t, __m512i (&out)[4]) const {
        bool both = t + 1 < rows.count;
        int64_t next = both ? t + 1 : t;
        __mmask64 there = both ? ~0ull : 0;
        const uint8_t *first = rows.of(t), *second = rows.of(next);
        if constexpr (nibbles(DTYPE)) {
            nibble.pairs(first + byte, second + byte, static_cast<__mmask32>(inside[0]), out);
        } else if constexpr (DTYPE == BF16) {
            Two a = keys(first), b = keys(second, there);
            out[0] = _mm512_unpacklo_epi16(a.first, b.first), out[1] = _mm512_unpackhi_epi16(a.first, b.first);
            out[2] = _mm512_unpacklo_epi16(a.second, b.second), out[3] = _mm512_unpackhi_epi16(a.second, b.second);
        } else {
            __m512i a = _mm512_maskz_loadu_epi8(inside[0], first + byte);
            __m512i b = _mm512_maskz_loadu_epi8(inside[0] & there, second + byte);
            Two low = unpacked(table(_mm512_unpacklo_epi8(a, b))), high = unpacked(table(_mm512_unpackhi_epi8(a, b)));
            out[0] = low.first, out[1] = low.second, out[2] = high.first, out[3] = high.second;
        }
    }

    // Asks for as many lines of the next tile as `rows` of this one take in these columns.
    INLINE void ask(const Rows& rows, int64_t n, int64_t c) const {
        if (LINES == 0 && c % 128 != 0) return;
        for (int64_t i = 0; i < n * (LINES ? LINES : 1); i++) rows.ahead->some();
    }
};

// Sums of sixteen vectors, in the order of `place_of_sum`.
INLINE __m512 sums_of(const __m512 (&x)[16]) {
    __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[i], x[i + 8]), _mm512_unpackhi_ps(x[i], x[i + 8]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d p = _mm512_castps_pd(a[i]), q = _mm512_castps_pd(a[i + 4]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
    }
    auto lanes = [](__m512 p, __m512 q) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xDD));
    };
    c[0] = lanes(b[0], b[2]), c[1] = lanes(b[1], b[3]);
    return lanes(c[0], c[1]);
}
// Which of the sixteen is summed in lane i.
constexpr int place_of_sum(int i) { return i % 2 * 8 + i / 2 % 2 * 4 + i / 4 % 2 * 2 + i / 8; }

// Scores of a tile, for ROWS rows of queries [ROWS, columns], 16 / ROWS keys at a time; past the tile's end they are
// those of its last key.
template <int64_t DTYPE, int ROWS>
void few_scores(const Rows& rows, const Rows& factors, int64_t columns, const uint32_t* queries, float* out) {
    if constexpr (nibbles(DTYPE)) return nibble_scores<DTYPE, ROWS>(rows, factors, columns, queries, out);
    constexpr int KEYS = 16 / ROWS;
    Codes<DTYPE> codes(columns);
    int64_t units = up(columns, SPAN) / 2;
    for (int64_t t = 0; t < rows.count; t += KEYS) {
        const uint8_t* row[KEYS];
        for (int i = 0; i < KEYS; i++) row[i] = rows.of(t + i < rows.count ? t + i : rows.count - 1);
        __m512 sum[16];
#pragma GCC unroll 16
        for (__m512& x : sum) x = _mm512_setzero_ps();
        for (int64_t c = 0; c < columns; c += SPAN) {
            codes.at(c);
            codes.ask(rows, KEYS, c);
#pragma GCC unroll 16
            for (int i = 0; i < KEYS; i++) {
                Two x = codes.keys(row[i]);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    const uint32_t* q = queries + r * units + c / 2;
                    __m512& to = sum[place_of_sum(r * KEYS + i)];
                    to = _mm512_dpbf16_ps(to, (__m512bh)x.first, (__m512bh)_mm512_loadu_si512(q));
                    to = _mm512_dpbf16_ps(to, (__m512bh)x.second, (__m512bh)_mm512_loadu_si512(q + 16));
                }
            }
        }
        float each[16];
        _mm512_storeu_ps(each, sums_of(sum));
        for (int r = 0; r < ROWS; r++) memcpy(out + r * TILE + t, each + r * KEYS, KEYS * sizeof(float));
    }
}

// Rows that are computed for so many.
constexpr int64_t padded_rows(int64_t rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : 8; }

template <int64_t DTYPE>
void few_scores_of(const Rows& rows, const Rows& factors, int64_t columns, const uint32_t* queries, int64_t count,
                   float* out) {
    switch (padded_rows(count)) {
        case 1: return few_scores<DTYPE, 1>(rows, factors, columns, queries, out);
        case 2: return few_scores<DTYPE, 2>(rows, factors, columns, queries, out);
        case 4: return few_scores<DTYPE, 4>(rows, factors, columns, queries, out);
        default: return few_scores<DTYPE, 8>(rows, factors, columns, queries, out);
    }
}

// What values of a tile are multiplied with: weights [rows, TILE / 2 units]. Of e2m1 it is the probabilities [rows, TILE]
// times the factors of blocks, or what rounding took from those. Of int4 each row has `lacks` beside: sums start from
// there, since without it they would be large, and their last digits lost in a long state.
struct Weights {
    const uint32_t* units;
    const float* probabilities;
    bool rest;
    const float* lacks;
    Weights from(int64_t row) const {
        return {units + row * (TILE / 2), probabilities + row * TILE, rest, lacks + row};
    }
};

// Rows [ROWS, columns] of a state += weights × values of a tile.
template <int64_t DTYPE, int ROWS>
void few_values(const Rows& rows, const Rows& factors, int64_t columns, const Weights& weights, float* out, int64_t stride) {
    const uint32_t* of_rows = weights.units;
    Codes<DTYPE> codes(columns);
    BlockWeights<ROWS> by_block;  // of e2m1
    for (int64_t c = 0; c < columns; c += SPAN) {
        codes.at(c);
        if (DTYPE == E2M1 && c % (2 * SPAN) == 0)
            by_block.fill(factors, c / 16, columns / 16, weights.probabilities, weights.rest);
        __m512 sum[ROWS][4];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * 4; i++) {
            const float* x = out + i / 4 * stride + c + i % 4 * W;
            sum[i / 4][i % 4] = DTYPE == INT4 ? _mm512_set1_ps(weights.lacks[i / 4]) : _mm512_loadu_ps(x);
        }
        for (int64_t t = 0; t < rows.count; t += 2) {
            __m512i units[4];
            codes.values(rows, t, units);
            codes.ask(rows, 2, c);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                __m512i w;
                if constexpr (DTYPE == E2M1) w = by_block.at(r, t / 2, c);
                else w = _mm512_set1_epi32(static_cast<int>(of_rows[r * (TILE / 2) + t / 2]));
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)w, (__m512bh)units[v]);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * 4; i++) {
            float* x = out + i / 4 * stride + c + i % 4 * W;
            __m512 y = sum[i / 4][i % 4];
            _mm512_storeu_ps(x, DTYPE == INT4 ? _mm512_add_ps(_mm512_loadu_ps(x), y) : y);
        }
    }
}

template <int64_t DTYPE>
void few_values_of(const Rows& rows, const Rows& factors, int64_t columns, const Weights& weights, int64_t count,
                   float* out, int64_t stride) {
    for (int64_t r = 0; r < count; r += 4, out += 4 * stride) switch (count - r) {
            case 1: few_values<DTYPE, 1>(rows, factors, columns, weights.from(r), out, stride); break;
            case 2: few_values<DTYPE, 2>(rows, factors, columns, weights.from(r), out, stride); break;
            case 3: few_values<DTYPE, 3>(rows, factors, columns, weights.from(r), out, stride); break;
            default: few_values<DTYPE, 4>(rows, factors, columns, weights.from(r), out, stride);
        }
}

// The pairs of a tile of values, stored as `multiply` takes them.
template <int64_t DTYPE>
void few_pairs(const Rows& rows, int64_t columns, uint32_t* out, int64_t stride) {
    Codes<DTYPE> codes(columns);
    for (int64_t c = 0; c < columns; c += SPAN) {
        codes.at(c);
        for (int64_t t = 0; t < rows.count; t += 2) {
            __m512i units[4];
            codes.values(rows, t, units);
            for (int v = 0; v < 4; v++) _mm512_storeu_si512(out + t / 2 * stride + c + v * W, units[v]);
        }
    }
}

#define BY_DTYPE_OF_FEW(dtype, f, ...)                 \
    switch (dtype) {                                   \
        case BF16: return f<BF16>(__VA_ARGS__);        \
        case E4M3: return f<E4M3>(__VA_ARGS__);        \
        case E5M2: return f<E5M2>(__VA_ARGS__);        \
        case INT8: return f<INT8>(__VA_ARGS__);        \
        case E2M1: return f<E2M1>(__VA_ARGS__);        \
        case INT4: return f<INT4>(__VA_ARGS__);        \
    }

inline void scores_of_few(Pairs, int64_t dtype, const Rows& rows, const Rows& factors, int64_t columns,
                          const uint32_t* queries, int64_t count, float* out) {
    BY_DTYPE_OF_FEW(dtype, few_scores_of, rows, factors, columns, queries, count, out)
}

inline void values_of_few(Pairs, int64_t dtype, const Rows& rows, const Rows& factors, int64_t columns,
                          const Weights& weights, int64_t count, float* out, int64_t stride) {
    BY_DTYPE_OF_FEW(dtype, few_values_of, rows, factors, columns, weights, count, out, stride)
}

// Codes that may be NaN; whole numbers need no tile to be looked through.
inline void pairs_of_few(Pairs, int64_t dtype, const Rows& rows, int64_t columns, uint32_t* out, int64_t stride) {
    switch (dtype) {
        case BF16: return few_pairs<BF16>(rows, columns, out, stride);
        case E4M3: return few_pairs<E4M3>(rows, columns, out, stride);
        case E5M2: return few_pairs<E5M2>(rows, columns, out, stride);
    }
}

// A row of queries, its columns in the order of keys. Returns their sum.
inline float query_of_few(Pairs, const char* row, int64_t dtype, int64_t columns, int64_t keys, uint32_t* out) {
    int64_t size = dtype == F32 ? 4 : dtype == E4M3 || dtype == E5M2 ? 1 : 2;
    float sum = 0.0f;
    for (int64_t c = 0; c < columns; c += SPAN) {
        float x[SPAN] = {};
        read_floats(row + c * size, dtype, x, columns - c < SPAN ? columns - c : SPAN);
        for (int64_t i = 0; i < SPAN; i += 2) {
            float pair[2] = {x[key_order(keys, i)], x[key_order(keys, i + 1)]};
            *out++ = unit_of(Pairs(), pair);
            sum += pair[0] + pair[1];
        }
    }
    return sum;
}

// A row of values in the order in which they were unpacked → in the order of columns.
inline void columns_of_few(Pairs, int64_t dtype, int64_t columns, float* row) {
    for (int64_t c = 0; c < columns; c += SPAN, row += SPAN) {
        float x[SPAN];
        for (int64_t i = 0; i < SPAN; i++) x[value_order(dtype, i)] = row[i];
        memcpy(row, x, sizeof x);
    }
}

}  // namespace
#endif
