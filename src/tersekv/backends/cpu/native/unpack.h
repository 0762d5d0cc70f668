// Unpacks rows of codes to tiles for `multiply`: keys [packed words of a row, BLOCK_N], values [tokens / VALUES,
// columns].
//
// Codes are loaded as numbers, without scales, which multiply scores and P instead: so 8-bit and 4-bit codes are exact
// in bf16 too.
#pragma once

#include "gemm.h"

namespace {

constexpr int BLOCK_N = 64;  // keys

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Prefetches rows of the next tile: `prefetch_line` fetches the next cache line, interleaved with other work. In memory order,
// all heads of a token together, since DRAM delivers neighbours at twice the rate.
struct RowPrefetcher {
    const char* base;
    const int64_t* offset;  // per row
    int64_t row, rows, byte, bytes;
    // NOTE: without inlining, a call would spill every vector register.
    __attribute__((always_inline)) void prefetch_line() {
        if (row >= rows) return;
        __builtin_prefetch(base + offset[row] + byte, 0, 2);
        byte += 64;
        if (byte >= bytes) byte = 0, row++;
    }
    void prefetch_remaining_lines() {
        while (row < rows) prefetch_line();
    }
};

// Addresses of a tile's rows: `of(t)` for t < count.
struct Rows {
    const char* base;
    const int64_t* offset;
    int64_t count;
    RowPrefetcher* ahead;
    const uint8_t* of(int64_t t) const { return reinterpret_cast<const uint8_t*>(base + offset[t]); }
};

constexpr bool is_4_bit(int64_t dtype) { return dtype == E2M1 || dtype == INT4; }

constexpr int bits_of(int64_t dtype) { return is_4_bit(dtype) ? 4 : dtype == BF16 || dtype == F16 ? 16 : 8; }

inline float decode_element(int64_t dtype, const uint8_t* p, int64_t i) {
    switch (dtype) {
        case BF16: return from_bf16(load<uint16_t>(p + 2 * i));
        case F16: return from_f16(load<uint16_t>(p + 2 * i));
        case E4M3: return E4M3_VALUES.of[p[i]];
        case E5M2: return E5M2_VALUES.of[p[i]];
        case INT8: return static_cast<int8_t>(p[i]);
        case E8M0: return from_bits(p[i] == 0 ? 1u << 22 : p[i] == 255 ? 0x7FC00000u : static_cast<uint32_t>(p[i]) << 23);
        case INT4: return INT4_VALUES[p[i / 2] >> (i % 2 * 4) & 15];
        default: return E2M1_VALUES[p[i / 2] >> (i % 2 * 4) & 15];
    }
}

// Exponents + 127 → powers of two; 255 is NaN, and 2^-127 subnormal.
inline VecF decode_e8m0(VecI x) {
    VecI b = x == 0 ? broadcast(1 << 22) : x << 23;
    return (VecF)(x == 255 ? broadcast(0x7FC00000) : b);
}

#if defined(__AVX512F__)

// Decodes sixteen codes, packed in the lowest bytes.
template <int64_t DTYPE>
inline VecF decode_16_packed_codes_to_fp32(__m256i packed_codes) {
    if (DTYPE == BF16) return (VecF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed_codes), 16);
    if (DTYPE == F16) return (VecF)_mm512_cvtph_ps(packed_codes);
    __m128i codes = _mm256_castsi256_si128(packed_codes);
    if (is_4_bit(DTYPE)) {
        // Eight bytes, one per quadword; each half gets its nibble in its lowest bits.
        __m512i x = _mm512_cvtepu8_epi64(codes);
        x = _mm512_or_si512(x, _mm512_slli_epi64(x, 28));
        return (VecF)_mm512_permutexvar_ps(x, _mm512_loadu_ps(DTYPE == INT4 ? INT4_VALUES : E2M1_VALUES));
    }
    if (DTYPE == INT8) return (VecF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    if (DTYPE == E8M0) return decode_e8m0((VecI)_mm512_cvtepu8_epi32(codes));
    if (DTYPE == E5M2) return (VecF)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
    // The bits of fp16 numbers 2^8 too small; what would be 480 is NaN.
    __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(~0x4000));
    VecF x = (VecF)_mm512_cvtph_ps(half) * 256.0f;
    return (VecF)((VecI)x & 0x7FFFFFFF) == 480.0f ? broadcast(__builtin_nanf("")) : x;
}

#elif defined(__AVX2__)

template <int64_t DTYPE>
inline VecF decode_vector_of_codes_to_fp32(const uint8_t* p) {
    if (DTYPE == BF16) return (VecF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
    if (DTYPE == F16) return (VecF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    if (is_4_bit(DTYPE)) {
        // Four bytes, one per quadword; each half gets its nibble in its lowest bits. Bit 3 of e2m1 is the sign.
        __m256i x = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load<int32_t>(p)));
        x = _mm256_or_si256(x, _mm256_slli_epi64(x, 28));
        if (DTYPE == INT4) return (VecF)_mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15))) - INT4_MIDDLE;
        __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1_VALUES), x);
        __m256i sign = _mm256_and_si256(_mm256_slli_epi32(x, 28), _mm256_set1_epi32(INT32_MIN));
        return (VecF)_mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
    }
    __m128i codes = _mm_loadl_epi64((const __m128i*)p);
    if (DTYPE == INT8) return (VecF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    if (DTYPE == E8M0) return decode_e8m0((VecI)_mm256_cvtepu8_epi32(codes));
    if (DTYPE == E5M2) return (VecF)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(codes), 8));
    // The bits of fp16 numbers 2^8 too small; what would be 480 is NaN.
    __m128i half = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7), _mm_set1_epi16(~0x4000));
    VecF x = (VecF)_mm256_cvtph_ps(half) * 256.0f;
    return (VecF)((VecI)x & 0x7FFFFFFF) == 480.0f ? broadcast(__builtin_nanf("")) : x;
}

#else

template <int64_t DTYPE>
inline VecF decode_vector_of_codes_to_fp32(const uint8_t* p) {
    VecF x;
    for (int i = 0; i < W; i++) x[i] = decode_element(DTYPE, p, i);
    return x;
}

#endif

// W codes from a column on; past the row's end they are 0 and nothing is read.
template <int64_t DTYPE>
inline VecF decode_vector_zero_past_row_end(const uint8_t* row, int64_t first_column, int64_t row_columns) {
    constexpr int BITS = bits_of(DTYPE);
#if defined(__AVX512F__)
    int64_t bytes = (row_columns - first_column < W ? row_columns - first_column : W) * BITS / 8;
    return decode_16_packed_codes_to_fp32<DTYPE>(_mm256_maskz_loadu_epi8((1ull << bytes) - 1, row + first_column * BITS / 8));
#else
    if (first_column + W <= row_columns) return decode_vector_of_codes_to_fp32<DTYPE>(row + first_column * BITS / 8);
    uint8_t last[W * 2] = {};
    memcpy(last, row + first_column * BITS / 8, (row_columns - first_column) * BITS / 8);
    return decode_vector_of_codes_to_fp32<DTYPE>(last);
#endif
}

template <int64_t DTYPE>
void unpack_and_transpose_keys_fp32(const Rows& rows, int64_t columns, uint32_t* out) {
    for (int64_t t = 0; t < rows.count; t += W) {
        const uint8_t* row[W];  // the last token is repeated: those scores are not used
        for (int i = 0; i < W; i++) row[i] = rows.of(t + i < rows.count ? t + i : rows.count - 1);
        for (int64_t c = 0; c < columns; c += W) {
            VecF r[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) {
                r[i] = decode_vector_zero_past_row_end<DTYPE>(row[i], c, columns);
                if (c * bits_of(DTYPE) / 8 % 64 == 0) rows.ahead->prefetch_line();
            }
            transpose(r);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                if (c + i < columns) store(out + (c + i) * BLOCK_N + t, r[i]);
        }
    }
}

template <int64_t DTYPE>
void unpack_values_fp32(const Rows& rows, int64_t columns, uint32_t* out, int64_t stride) {
    for (int64_t t = 0; t < rows.count; t++) {
        const uint8_t* row = rows.of(t);
        for (int64_t c = 0; c < columns; c += W) {
            store(out + t * stride + c, decode_vector_zero_past_row_end<DTYPE>(row, c, columns));
            if (c * bits_of(DTYPE) / 8 % 64 == 0) rows.ahead->prefetch_line();
        }
    }
}

// Calls f<DTYPE>(…) for a runtime dtype.
#define BY_DTYPE(dtype, f, ...)                        \
    switch (dtype) {                                   \
        case BF16: return f<BF16>(__VA_ARGS__);        \
        case F16: return f<F16>(__VA_ARGS__);          \
        case E4M3: return f<E4M3>(__VA_ARGS__);        \
        case E5M2: return f<E5M2>(__VA_ARGS__);        \
        case INT8: return f<INT8>(__VA_ARGS__);        \
        case E2M1: return f<E2M1>(__VA_ARGS__);        \
        case INT4: return f<INT4>(__VA_ARGS__);        \
    }

// Packs keys, transposed: word u of token t at out[u * BLOCK_N + t].
inline void pack_keys(Fp32Packing, int64_t dtype, const Rows& rows, int64_t columns, uint32_t* out) {
    BY_DTYPE(dtype, unpack_and_transpose_keys_fp32, rows, columns, out)
}

// Packs values: the word of tokens [t, t + VALUES) and column c at out[t / VALUES * stride + c]; 0 past the last token.
inline void pack_values(Fp32Packing, int64_t dtype, const Rows& rows, int64_t columns, uint32_t* out, int64_t stride) {
    BY_DTYPE(dtype, unpack_values_fp32, rows, columns, out, stride)
}

// Loads scale g of token t to out[g * BLOCK_N + t]; the last token is repeated.
inline void load_and_transpose_scales(int64_t dtype, const Rows& rows, int64_t scales_per_row, float* out) {
    if (dtype == E4M3) return unpack_and_transpose_keys_fp32<E4M3>(rows, scales_per_row, reinterpret_cast<uint32_t*>(out));
    if (dtype == E8M0) return unpack_and_transpose_keys_fp32<E8M0>(rows, scales_per_row, reinterpret_cast<uint32_t*>(out));
    for (int64_t g = 0; g < scales_per_row; g++, out += BLOCK_N) {
        for (int64_t t = 0; t < rows.count; t++) out[t] = load<float>(rows.of(t) + 4 * g);
        for (int64_t t = rows.count; t < round_up(rows.count, W); t++) out[t] = out[rows.count - 1];
    }
    rows.ahead->prefetch_remaining_lines();
}

// Returns the shift of int4 rows, INT4_MIDDLE − zero point: x ≈ (decoded code + shift) × scale.
inline VecF zero_point_shift(const float* scales, int64_t t) {
    constexpr float MAGIC = 8388608.0f;  // 2^23: OR-ing a small integer into its lowest bits adds it
    VecF zero = (VecF)(((VecI)load<VecF>(scales + t) & 15) | static_cast<int32_t>(0x4B000000));
    return (MAGIC + INT4_MIDDLE) - zero;
}

}  // namespace
