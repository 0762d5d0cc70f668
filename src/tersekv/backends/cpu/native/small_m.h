// QK and PV for small M in bf16 pairs, straight from rows of codes: with few rows, transposing a tile of keys and
// storing a tile of values would take longer than the products.
//
// QK: a score accumulates over a vector of columns; sixteen scores are then reduced together. 4-bit codes are small
// enough to transpose first, before they are unpacked (small_m_4_bit.h). PV: pairs of two tokens' values are built and
// multiplied in registers. Columns stay in the order that unpacking leaves, 64 at a time: queries are packed in that
// order, and outputs are reordered at the end.
#pragma once

#include "small_m_4_bit.h"

#if HAS_BF16_PRODUCTS
namespace {

// Column of the i-th of 64 unpacked columns, of keys and of values.
constexpr int64_t query_column_of_key_word(int64_t dtype, int64_t i) {
    int64_t chunk = i / 8;
    if (dtype == BF16) return i;
    return is_4_bit(dtype) ? chunk * 8 + i % 8 / 2 + i % 2 * 4 : chunk % 4 * 16 + chunk / 4 * 8 + i % 8;
}
constexpr int64_t column_of_value_lane(int64_t dtype, int64_t i) {
    int64_t v = i / 16, lane = i % 16 / 4, j = i % 4;
    if (dtype == BF16) return v / 2 * 32 + lane * 8 + v % 2 * 4 + j;
    return is_4_bit(dtype) ? j * 16 + lane * 4 + v : lane * 16 + v * 4 + j;
}

struct VectorPair {
    __m512i first, second;
};

INLINE VectorPair interleave(const LowAndHighBytes& x) { return {_mm512_unpacklo_epi8(x.low, x.high), _mm512_unpackhi_epi8(x.low, x.high)}; }

// Loads codes of 64 columns from column c on as bf16; past the row's end they are 0 and not read.
template <int64_t DTYPE>
struct Codes {
    static constexpr int64_t LINES = bits_of(DTYPE) / 8;  // cache lines per 64 columns; 0: a half
    const CodeToBf16Table<is_4_bit(DTYPE) || DTYPE == BF16 ? E4M3 : DTYPE> table;
    const Nibble<is_4_bit(DTYPE) ? DTYPE : INT4> nibble;
    const int64_t columns;
    int64_t byte = 0;
    __mmask64 inside[2] = {};

    explicit Codes(int64_t n) : columns(n) {}

    void select_columns(int64_t c) {
        byte = c * bits_of(DTYPE) / 8;
        for (int i = 0; i < 2; i++) inside[i] = first_bytes(columns * bits_of(DTYPE) / 8 - byte - 64 * i);
    }

    INLINE VectorPair load_key_columns_as_bf16(const uint8_t* row, __mmask64 byte_mask = ~0ull) const {
        __m512i x = _mm512_maskz_loadu_epi8(inside[0] & byte_mask, row + byte);
        if constexpr (DTYPE == BF16) return {x, _mm512_maskz_loadu_epi8(inside[1] & byte_mask, row + byte + 64)};
        else return interleave(table.bf16_bytes_of(x));
    }

    // Loads pairs of tokens t and t + 1; past the last token they are 0, or any 4-bit number.
    INLINE void load_value_pairs_of_2_tokens(const Rows& rows, int64_t first_token, __m512i (&out)[4]) const {
        bool both = first_token + 1 < rows.count;
        int64_t next = both ? first_token + 1 : first_token;
        __mmask64 there = both ? ~0ull : 0;
        const uint8_t *first = rows.of(first_token), *second = rows.of(next);
        if constexpr (is_4_bit(DTYPE)) {
            nibble.load_value_pairs(first + byte, second + byte, static_cast<__mmask32>(inside[0]), out);
        } else if constexpr (DTYPE == BF16) {
            VectorPair a = load_key_columns_as_bf16(first), b = load_key_columns_as_bf16(second, there);
            out[0] = _mm512_unpacklo_epi16(a.first, b.first), out[1] = _mm512_unpackhi_epi16(a.first, b.first);
            out[2] = _mm512_unpacklo_epi16(a.second, b.second), out[3] = _mm512_unpackhi_epi16(a.second, b.second);
        } else {
            __m512i a = _mm512_maskz_loadu_epi8(inside[0], first + byte);
            __m512i b = _mm512_maskz_loadu_epi8(inside[0] & there, second + byte);
            VectorPair low = interleave(table.bf16_bytes_of(_mm512_unpacklo_epi8(a, b))), high = interleave(table.bf16_bytes_of(_mm512_unpackhi_epi8(a, b)));
            out[0] = low.first, out[1] = low.second, out[2] = high.first, out[3] = high.second;
        }
    }

    // Prefetches as many cache lines of the next tile as n rows of this one take in these columns.
    INLINE void prefetch_rows(const Rows& rows, int64_t n, int64_t c) const {
        if (LINES == 0 && c % 128 != 0) return;
        for (int64_t i = 0; i < n * (LINES ? LINES : 1); i++) rows.ahead->prefetch_line();
    }
};

// Reduces sixteen vectors to their sums, in the order of `lane_order_of_sum`.
INLINE __m512 reduce_16_vectors_in_permuted_order(const __m512 (&x)[16]) {
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
// Index of the vector whose sum is in lane i.
constexpr int lane_order_of_sum(int i) { return i % 2 * 8 + i / 2 % 2 * 4 + i / 4 % 2 * 2 + i / 8; }

// QK: scores of a tile for queries [ROWS, columns], 16 / ROWS keys at a time; past the tile's end the last key is
// repeated.
template <int64_t DTYPE, int ROWS>
void compute_scores_small_m_kernel(const Rows& rows, const Rows& e2m1_block_scales, int64_t columns, const uint32_t* queries, float* out) {
    if constexpr (is_4_bit(DTYPE)) return compute_scores_4_bit<DTYPE, ROWS>(rows, e2m1_block_scales, columns, queries, out);
    constexpr int KEYS = 16 / ROWS;
    Codes<DTYPE> codes(columns);
    int64_t units = round_up(columns, SPAN) / 2;
    for (int64_t t = 0; t < rows.count; t += KEYS) {
        const uint8_t* row[KEYS];
        for (int i = 0; i < KEYS; i++) row[i] = rows.of(t + i < rows.count ? t + i : rows.count - 1);
        __m512 sum[16];
#pragma GCC unroll 16
        for (__m512& x : sum) x = _mm512_setzero_ps();
        for (int64_t c = 0; c < columns; c += SPAN) {
            codes.select_columns(c);
            codes.prefetch_rows(rows, KEYS, c);
#pragma GCC unroll 16
            for (int i = 0; i < KEYS; i++) {
                VectorPair x = codes.load_key_columns_as_bf16(row[i]);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    const uint32_t* q = queries + r * units + c / 2;
                    __m512& to = sum[lane_order_of_sum(r * KEYS + i)];
                    to = _mm512_dpbf16_ps(to, (__m512bh)x.first, (__m512bh)_mm512_loadu_si512(q));
                    to = _mm512_dpbf16_ps(to, (__m512bh)x.second, (__m512bh)_mm512_loadu_si512(q + 16));
                }
            }
        }
        float each[16];
        _mm512_storeu_ps(each, reduce_16_vectors_in_permuted_order(sum));
        for (int r = 0; r < ROWS; r++) memcpy(out + r * BLOCK_N + t, each + r * KEYS, KEYS * sizeof(float));
    }
}

// Number of rows that are computed for `rows`.
constexpr int64_t padded_rows(int64_t rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : 8; }

template <int64_t DTYPE>
void dispatch_scores_by_num_rows(const Rows& rows, const Rows& e2m1_block_scales, int64_t columns, const uint32_t* queries, int64_t num_query_rows,
                   float* out) {
    switch (padded_rows(num_query_rows)) {
        case 1: return compute_scores_small_m_kernel<DTYPE, 1>(rows, e2m1_block_scales, columns, queries, out);
        case 2: return compute_scores_small_m_kernel<DTYPE, 2>(rows, e2m1_block_scales, columns, queries, out);
        case 4: return compute_scores_small_m_kernel<DTYPE, 4>(rows, e2m1_block_scales, columns, queries, out);
        default: return compute_scores_small_m_kernel<DTYPE, 8>(rows, e2m1_block_scales, columns, queries, out);
    }
}

// P of a tile: packed [rows, BLOCK_N / 2]. e2m1 uses the fp32 `probabilities` [rows, BLOCK_N] times block scales, or,
// with `rest`, their rounding error. int4: sums start at each row's `lacks`, its zero-point term, which keeps them
// small: added to acc_o as large numbers they would lose digits.
struct ProbabilityTile {
    const uint32_t* units;
    const float* probabilities;
    bool rest;
    const float* lacks;
    ProbabilityTile from(int64_t row) const {
        return {units + row * (BLOCK_N / 2), probabilities + row * BLOCK_N, rest, lacks + row};
    }
};

// PV: acc_o [ROWS, columns] += P × values of a tile.
template <int64_t DTYPE, int ROWS>
void accumulate_pv_small_m_kernel(const Rows& rows, const Rows& e2m1_block_scales, int64_t columns, const ProbabilityTile& packed_p, float* acc_o, int64_t acc_row_stride) {
    const uint32_t* of_rows = packed_p.units;
    Codes<DTYPE> codes(columns);
    BlockScaledP<ROWS> by_block;  // e2m1 only
    for (int64_t c = 0; c < columns; c += SPAN) {
        codes.select_columns(c);
        if (DTYPE == E2M1 && c % (2 * SPAN) == 0)
            by_block.pack_scaled_p_into_this(e2m1_block_scales, c / 16, columns / 16, packed_p.probabilities, packed_p.rest);
        __m512 sum[ROWS][4];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * 4; i++) {
            const float* x = acc_o + i / 4 * acc_row_stride + c + i % 4 * W;
            sum[i / 4][i % 4] = DTYPE == INT4 ? _mm512_set1_ps(packed_p.lacks[i / 4]) : _mm512_loadu_ps(x);
        }
        for (int64_t t = 0; t < rows.count; t += 2) {
            __m512i units[4];
            codes.load_value_pairs_of_2_tokens(rows, t, units);
            codes.prefetch_rows(rows, 2, c);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                __m512i w;
                if constexpr (DTYPE == E2M1) w = by_block.scaled_p_at(r, t / 2, c);
                else w = _mm512_set1_epi32(static_cast<int>(of_rows[r * (BLOCK_N / 2) + t / 2]));
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)w, (__m512bh)units[v]);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * 4; i++) {
            float* x = acc_o + i / 4 * acc_row_stride + c + i % 4 * W;
            __m512 y = sum[i / 4][i % 4];
            _mm512_storeu_ps(x, DTYPE == INT4 ? _mm512_add_ps(_mm512_loadu_ps(x), y) : y);
        }
    }
}

template <int64_t DTYPE>
void dispatch_accumulate_pv_by_num_rows(const Rows& rows, const Rows& e2m1_block_scales, int64_t columns, const ProbabilityTile& packed_p, int64_t num_query_rows,
                   float* acc_o, int64_t acc_row_stride) {
    for (int64_t r = 0; r < num_query_rows; r += 4, acc_o += 4 * acc_row_stride) switch (num_query_rows - r) {
            case 1: accumulate_pv_small_m_kernel<DTYPE, 1>(rows, e2m1_block_scales, columns, packed_p.from(r), acc_o, acc_row_stride); break;
            case 2: accumulate_pv_small_m_kernel<DTYPE, 2>(rows, e2m1_block_scales, columns, packed_p.from(r), acc_o, acc_row_stride); break;
            case 3: accumulate_pv_small_m_kernel<DTYPE, 3>(rows, e2m1_block_scales, columns, packed_p.from(r), acc_o, acc_row_stride); break;
            default: accumulate_pv_small_m_kernel<DTYPE, 4>(rows, e2m1_block_scales, columns, packed_p.from(r), acc_o, acc_row_stride);
        }
}

// Stores the pairs of a tile of values in the layout of `multiply`.
template <int64_t DTYPE>
void unpack_values_small_m_kernel(const Rows& rows, int64_t columns, uint32_t* out, int64_t stride) {
    Codes<DTYPE> codes(columns);
    for (int64_t c = 0; c < columns; c += SPAN) {
        codes.select_columns(c);
        for (int64_t t = 0; t < rows.count; t += 2) {
            __m512i units[4];
            codes.load_value_pairs_of_2_tokens(rows, t, units);
            for (int v = 0; v < 4; v++) _mm512_storeu_si512(out + t / 2 * stride + c + v * W, units[v]);
        }
    }
}

#define SMALL_M_BY_DTYPE(dtype, f, ...)                 \
    switch (dtype) {                                   \
        case BF16: return f<BF16>(__VA_ARGS__);        \
        case E4M3: return f<E4M3>(__VA_ARGS__);        \
        case E5M2: return f<E5M2>(__VA_ARGS__);        \
        case INT8: return f<INT8>(__VA_ARGS__);        \
        case E2M1: return f<E2M1>(__VA_ARGS__);        \
        case INT4: return f<INT4>(__VA_ARGS__);        \
    }

inline void scores_small_m(Bf16Packing, int64_t dtype, const Rows& rows, const Rows& e2m1_block_scales, int64_t columns,
                          const uint32_t* queries, int64_t count, float* out) {
    SMALL_M_BY_DTYPE(dtype, dispatch_scores_by_num_rows, rows, e2m1_block_scales, columns, queries, count, out)
}

inline void accumulate_pv_small_m(Bf16Packing, int64_t dtype, const Rows& rows, const Rows& e2m1_block_scales, int64_t columns,
                          const ProbabilityTile& packed_p, int64_t count, float* acc_o, int64_t acc_row_stride) {
    SMALL_M_BY_DTYPE(dtype, dispatch_accumulate_pv_by_num_rows, rows, e2m1_block_scales, columns, packed_p, count, acc_o, acc_row_stride)
}

// For codes that may be NaN; integers need no test of the tile.
inline void unpack_values_small_m(Bf16Packing, int64_t dtype, const Rows& rows, int64_t columns, uint32_t* out, int64_t stride) {
    switch (dtype) {
        case BF16: return unpack_values_small_m_kernel<BF16>(rows, columns, out, stride);
        case E4M3: return unpack_values_small_m_kernel<E4M3>(rows, columns, out, stride);
        case E5M2: return unpack_values_small_m_kernel<E5M2>(rows, columns, out, stride);
    }
}

// Packs a query row, its columns in the order of `query_column_of_key_word`. Returns the sum of its columns.
inline float pack_query_small_m_and_return_sum(Bf16Packing, const char* row, int64_t dtype, int64_t columns, int64_t key_dtype, uint32_t* out) {
    int64_t size = dtype == F32 ? 4 : dtype == E4M3 || dtype == E5M2 ? 1 : 2;
    float sum = 0.0f;
    for (int64_t c = 0; c < columns; c += SPAN) {
        float x[SPAN] = {};
        read_floats(row + c * size, dtype, x, columns - c < SPAN ? columns - c : SPAN);
        for (int64_t i = 0; i < SPAN; i += 2) {
            float pair[2] = {x[query_column_of_key_word(key_dtype, i)], x[query_column_of_key_word(key_dtype, i + 1)]};
            *out++ = pack_word(Bf16Packing(), pair);
            sum += pair[0] + pair[1];
        }
    }
    return sum;
}

// Reorders a row of acc_o from the order of `column_of_value_lane` to columns.
inline void restore_output_column_order_small_m(Bf16Packing, int64_t dtype, int64_t columns, float* row) {
    for (int64_t c = 0; c < columns; c += SPAN, row += SPAN) {
        float x[SPAN];
        for (int64_t i = 0; i < SPAN; i++) x[column_of_value_lane(dtype, i)] = row[i];
        memcpy(row, x, sizeof x);
    }
}

}  // namespace
#endif
