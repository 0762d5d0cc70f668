// Attention of few rows, in pairs of bf16 numbers, straight from rows of codes: with so few, a tile of keys that must be
// transposed, and a tile of values that must be stored, would take longer than the products.
//
// A score is summed over a vector of columns first; sixteen of them are added up together. Pairs of two tokens' values
// are made in registers and multiplied there. Columns come in the order in which unpacking leaves them, 64 at a time:
// queries are laid out in that order, and outputs are put back from theirs.
#pragma once

#include "tile_pairs.h"

#if HAS_PAIRS
namespace {

constexpr int64_t SPAN = 64;  // columns that are unpacked together

// The bf16 numbers of e2m1 codes times an e4m3 factor. They have 6 significant bits: they are exact.
struct Products {
    struct alignas(32) {
        uint8_t low[16], high[16];
    } of[256];
    constexpr Products() : of() {
        constexpr int DOUBLED[8] = {0, 1, 2, 3, 4, 6, 8, 12};
        for (int s = 0; s < 256; s++)
            for (int code = 0; code < 16; code++) {
                int e = s >> 3 & 15, significand = e ? 8 + s % 8 : s % 8, n = significand * DOUBLED[code & 7];
                uint32_t half = n == 0 ? 0 : Bytes<INT8>::whole(n) + ((e ? e : 1) - 11) * 128;
                if (s % 128 == 127) half = 0x7FC0;
                half |= ((s >> 7) ^ (code >> 3)) << 15;
                of[s].low[code] = half & 0xFF;
                of[s].high[code] = half >> 8;
            }
    }
};
constexpr Products PRODUCTS;

// int4 without look-ups: a code put into the first bits behind the point of 16 is the bf16 number 16 + code. For each byte
// here: from which bit on eight are taken, of eight bytes; so that codes of a row, or of two rows in turns, come into
// words of their own, whose other bits are masked out. That 16 is too much goes into what is done for zero points.
struct Shifts {
    uint8_t keys[2][64], values[4][64];
    constexpr Shifts() : keys(), values() {
        for (int i = 0; i < 64; i += 2) {
            for (int v = 0; v < 2; v++) keys[v][i] = at(8 * v + i / 32 * 4 + i / 2 % 4);
            for (int v = 0; v < 4; v++) values[v][i] = at(2 * v + i / 4 % 2 + i / 2 % 2 * 8);
        }
    }
    static constexpr uint8_t at(int nibble) { return (4 * nibble + 61) % 64; }
};
alignas(64) constexpr Shifts SHIFTS;

// Of the i-th of 64 columns of keys, and of values: which column it is.
constexpr int64_t key_order(int64_t dtype, int64_t i) {
    int64_t chunk = i / 8, base = chunk % 4 * 16;
    if (dtype == BF16) return i;
    if (dtype == INT4) return i / 4 % 4 * 16 + i / 32 * 8 + i / 16 % 2 * 4 + i % 4;
    return dtype == E2M1 ? base + chunk / 4 + i % 8 * 2 : base + chunk / 4 * 8 + i % 8;
}
constexpr int64_t value_order(int64_t dtype, int64_t i) {
    int64_t v = i / 16, lane = i % 16 / 4, j = i % 4;
    if (dtype == BF16) return v / 2 * 32 + lane * 8 + v % 2 * 4 + j;
    if (dtype == INT4) return i % 16 / 2 * 8 + v * 2 + i % 2;
    return dtype == E2M1 ? lane * 16 + v / 2 + v % 2 * 8 + j * 2 : lane * 16 + v * 4 + j;
}

#define INLINE inline __attribute__((always_inline))

struct Two {
    __m512i first, second;
};

INLINE Two unpacked(const Look& x) { return {_mm512_unpacklo_epi8(x.low, x.high), _mm512_unpackhi_epi8(x.low, x.high)}; }

// Codes of 64 columns from column c on, as bf16 numbers; past the row's end they are 0 and are not read.
template <int64_t DTYPE>
struct Codes {
    static constexpr int64_t LINES = bits_of(DTYPE) / 8;  // cache lines of 64 columns; 0: a half
    const Table<nibbles(DTYPE) || DTYPE == BF16 ? E4M3 : DTYPE> table;
    const int64_t columns;
    int64_t byte = 0, factor[4] = {};
    __mmask64 inside[2] = {};

    explicit Codes(int64_t n) : columns(n) {}

    void at(int64_t c) {
        byte = c * bits_of(DTYPE) / 8;
        for (int i = 0; i < 2; i++) {
            int64_t left = columns * bits_of(DTYPE) / 8 - byte - 64 * i;
            inside[i] = left >= 64 ? ~0ull : left > 0 ? (1ull << left) - 1 : 0;
        }
        for (int i = 0; i < 4; i++) factor[i] = c / 16 + i < columns / 16 ? c / 16 + i : columns / 16 - 1;
    }

    INLINE Two keys(const uint8_t* row, const uint8_t* factors, __mmask64 there = ~0ull) const {
        __m512i x = _mm512_maskz_loadu_epi8(inside[0] & there, row + byte);
        if constexpr (DTYPE == BF16) return {x, _mm512_maskz_loadu_epi8(inside[1] & there, row + byte + 64)};
        else if constexpr (DTYPE == E2M1) return products(spread(x), factors);
        else if constexpr (DTYPE == INT4) {
            x = _mm512_shuffle_i64x2(x, x, 0x44);
            return {int4(x, SHIFTS.keys[0]), int4(x, SHIFTS.keys[1])};
        }
        else return unpacked(table(x));
    }

    // Pairs of tokens t and t + 1; past the last token they are 0.
    INLINE void values(const Rows& rows, const Rows& by, int64_t t, __m512i (&out)[4]) const {
        bool both = t + 1 < rows.count;
        int64_t second = both ? t + 1 : t;
        __mmask64 there = both ? ~0ull : 0;
        const uint8_t *row[2] = {rows.of(t), rows.of(second)}, *factors[2] = {};
        if (DTYPE == E2M1) factors[0] = by.of(t), factors[1] = by.of(second);
        if constexpr (DTYPE == INT4) {
            __m512i a = _mm512_maskz_loadu_epi8(inside[0], row[0] + byte);
            __m512i b = _mm512_maskz_loadu_epi8(inside[0] & there, row[1] + byte);
            const __m512i turns = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            __m512i x = _mm512_permutex2var_epi32(a, turns, b);
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) out[v] = int4(x, SHIFTS.values[v]);
        } else if constexpr (DTYPE == BF16 || DTYPE == E2M1) {
            Two a = keys(row[0], factors[0]), b = keys(row[1], factors[1], there);
            out[0] = _mm512_unpacklo_epi16(a.first, b.first), out[1] = _mm512_unpackhi_epi16(a.first, b.first);
            out[2] = _mm512_unpacklo_epi16(a.second, b.second), out[3] = _mm512_unpackhi_epi16(a.second, b.second);
        } else {
            __m512i a = _mm512_maskz_loadu_epi8(inside[0], row[0] + byte);
            __m512i b = _mm512_maskz_loadu_epi8(inside[0] & there, row[1] + byte);
            Two low = unpacked(table(_mm512_unpacklo_epi8(a, b))), high = unpacked(table(_mm512_unpackhi_epi8(a, b)));
            out[0] = low.first, out[1] = low.second, out[2] = high.first, out[3] = high.second;
        }
    }

    // Asks for as many lines of the next tile as `rows` of this one take in these columns.
    INLINE void ask(const Rows& rows, int64_t n, int64_t c) const {
        if (LINES == 0 && c % 128 != 0) return;
        for (int64_t i = 0; i < n * (LINES ? LINES : 1); i++) rows.ahead->some();
    }

private:
    static INLINE __m512i int4(__m512i x, const uint8_t (&from)[64]) {
        x = _mm512_multishift_epi64_epi8(_mm512_load_si512(from), x);
        return _mm512_ternarylogic_epi32(x, _mm512_set1_epi16(0x78), _mm512_set1_epi16(0x4180), 0xEA);  // x & 0x78 | 16.0
    }

    // Nibbles of 64 columns. A lane is a block of 16: first its even columns, then its odd ones.
    static INLINE __m512i spread(__m512i x) {
        x = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), x);
        x = _mm512_srlv_epi64(x, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4));
        return _mm512_and_si512(x, _mm512_set1_epi8(15));
    }

    INLINE Two products(__m512i x, const uint8_t* factors) const {
        auto tables = [&](int b) {  // of two blocks: the low bytes of one, its high ones, those of the other
            const void *p = PRODUCTS.of[factors[factor[b]]].low, *q = PRODUCTS.of[factors[factor[b + 1]]].low;
            __m512i first = _mm512_castsi256_si512(_mm256_load_si256(static_cast<const __m256i*>(p)));
            return _mm512_inserti64x4(first, _mm256_load_si256(static_cast<const __m256i*>(q)), 1);
        };
        __m512i a = tables(0), b = tables(2);
        __m512i low = _mm512_shuffle_i64x2(a, b, 0x88), high = _mm512_shuffle_i64x2(a, b, 0xDD);
        return unpacked({_mm512_shuffle_epi8(low, x), _mm512_shuffle_epi8(high, x)});
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
    constexpr int KEYS = 16 / ROWS;
    Codes<DTYPE> codes(columns);
    int64_t units = up(columns, SPAN) / 2;
    for (int64_t t = 0; t < rows.count; t += KEYS) {
        const uint8_t *row[KEYS], *by[KEYS] = {};
        for (int i = 0; i < KEYS; i++) {
            int64_t key = t + i < rows.count ? t + i : rows.count - 1;
            row[i] = rows.of(key);
            if (DTYPE == E2M1) by[i] = factors.of(key), factors.ahead->some();
        }
        __m512 sum[16];
#pragma GCC unroll 16
        for (__m512& x : sum) x = _mm512_setzero_ps();
        for (int64_t c = 0; c < columns; c += SPAN) {
            codes.at(c);
            codes.ask(rows, KEYS, c);
#pragma GCC unroll 16
            for (int i = 0; i < KEYS; i++) {
                Two x = codes.keys(row[i], by[i]);
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

// Rows [ROWS, columns] of a state += weights [ROWS, TILE / 2 units] × values of a tile. Of int4 each row has `lacks`
// beside: sums start from there, since without it they would be large, and their last digits lost in a long state.
template <int64_t DTYPE, int ROWS>
void few_values(const Rows& rows, const Rows& factors, int64_t columns, const uint32_t* weights, const float* lacks,
                float* out, int64_t stride) {
    Codes<DTYPE> codes(columns);
    for (int64_t c = 0; c < columns; c += SPAN) {
        codes.at(c);
        __m512 sum[ROWS][4];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * 4; i++) {
            const float* x = out + i / 4 * stride + c + i % 4 * W;
            sum[i / 4][i % 4] = DTYPE == INT4 ? _mm512_set1_ps(lacks[i / 4]) : _mm512_loadu_ps(x);
        }
        for (int64_t t = 0; t < rows.count; t += 2) {
            __m512i units[4];
            codes.values(rows, factors, t, units);
            codes.ask(rows, 2, c);
            if (DTYPE == E2M1 && c == 0) factors.ahead->some(), factors.ahead->some();
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                __m512bh w = (__m512bh)_mm512_set1_epi32(static_cast<int>(weights[r * (TILE / 2) + t / 2]));
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], w, (__m512bh)units[v]);
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
void few_values_of(const Rows& rows, const Rows& factors, int64_t columns, const uint32_t* weights, const float* lacks,
                   int64_t count, float* out, int64_t stride) {
    for (; count > 0; count -= 4, weights += 4 * (TILE / 2), lacks += 4, out += 4 * stride) switch (count) {
            case 1: few_values<DTYPE, 1>(rows, factors, columns, weights, lacks, out, stride); break;
            case 2: few_values<DTYPE, 2>(rows, factors, columns, weights, lacks, out, stride); break;
            case 3: few_values<DTYPE, 3>(rows, factors, columns, weights, lacks, out, stride); break;
            default: few_values<DTYPE, 4>(rows, factors, columns, weights, lacks, out, stride);
        }
}

// The pairs of a tile of values, stored as `multiply` takes them.
template <int64_t DTYPE>
void few_pairs(const Rows& rows, const Rows& factors, int64_t columns, uint32_t* out, int64_t stride) {
    Codes<DTYPE> codes(columns);
    for (int64_t c = 0; c < columns; c += SPAN) {
        codes.at(c);
        for (int64_t t = 0; t < rows.count; t += 2) {
            __m512i units[4];
            codes.values(rows, factors, t, units);
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
                          const uint32_t* weights, const float* lacks, int64_t count, float* out, int64_t stride) {
    BY_DTYPE_OF_FEW(dtype, few_values_of, rows, factors, columns, weights, lacks, count, out, stride)
}

inline void pairs_of_few(Pairs, int64_t dtype, const Rows& rows, const Rows& factors, int64_t columns, uint32_t* out,
                         int64_t stride) {
    BY_DTYPE_OF_FEW(dtype, few_pairs, rows, factors, columns, out, stride)
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
