// The tiles of `unpack.h` in bf16 pairs: AVX-512 with byte table look-ups.
#pragma once

#include "unpack.h"

#if HAS_BF16_PRODUCTS
namespace {

// Low and high bytes of the bf16 values of 128 codes: 8-bit floats and int8 without their signs.
template <int64_t DTYPE>
struct Bf16BytesOf8BitCodes {
    uint8_t low[128], high[128];
    constexpr Bf16BytesOf8BitCodes() : low(), high() {
        for (int i = 0; i < 128; i++) {
            uint32_t half = DTYPE == INT8 ? bf16_bits_of_int(i) : DTYPE == E5M2 ? bf16_bits_of_minifloat<5, 2>(i) : bf16_bits_of_minifloat<4, 3>(i);
            low[i] = half & 0xFF;
            high[i] = half >> 8;
        }
    }
    static constexpr uint32_t bf16_bits_of_int(int n) {
        int e = 0;
        while (n >> e > 1) e++;
        return n == 0 ? 0 : (127 + e) << 7 | (n << (7 - e) & 0x7F);
    }
    template <int EXPONENT, int MANTISSA>
    static constexpr uint32_t bf16_bits_of_minifloat(int code) {
        int bias = (1 << (EXPONENT - 1)) - 1, e = code >> MANTISSA, m = code & ((1 << MANTISSA) - 1);
        if (EXPONENT == 4 ? code == 127 : e == 31) return 0x7F80 | (EXPONENT == 4 || m ? 0x40 : 0);
        if (e == 0) {
            uint32_t n = bf16_bits_of_int(m);
            return n == 0 ? 0 : n - ((bias - 1 + MANTISSA) << 7);
        }
        return (e - bias + 127) << 7 | m << (7 - MANTISSA);
    }
};
template <int64_t DTYPE>
alignas(64) constexpr Bf16BytesOf8BitCodes<DTYPE> BYTES;

// Bytes of the bf16 values of the 16 codes of e2m1 and int4.
alignas(16) constexpr uint8_t E2M1_LOW[16] = {0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0, 0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0};
alignas(16) constexpr uint8_t E2M1_HIGH[16] = {0,    0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                               0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
alignas(16) constexpr uint8_t INT4_LOW[16] = {0, 0xE0, 0xC0, 0xA0, 0x80, 0x40, 0, 0x80, 0, 0x80, 0, 0x40, 0x80, 0xA0, 0xC0, 0xE0};
alignas(16) constexpr uint8_t INT4_HIGH[16] = {0xC1, 0xC0, 0xC0, 0xC0, 0xC0, 0xC0, 0xC0, 0xBF,
                                               0,    0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};

inline __m512i broadcast_16_bytes(const uint8_t (&bytes)[16]) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

struct LowAndHighBytes {
    __m512i low, high;  // bytes of bf16 numbers, in the order of the codes
};

template <int64_t DTYPE>
struct CodeToBf16Table {
    __m512i low[2], high[2];
    CodeToBf16Table() {
        for (int i = 0; i < 2; i++) {
            low[i] = _mm512_loadu_si512(BYTES<DTYPE>.low + 64 * i);
            high[i] = _mm512_loadu_si512(BYTES<DTYPE>.high + 64 * i);
        }
    }
    LowAndHighBytes bf16_bytes_of(__m512i byte_codes) const {
        __m512i i = DTYPE == INT8 ? _mm512_abs_epi8(byte_codes) : byte_codes, sign = _mm512_set1_epi8(-128);
        __m512i h = _mm512_permutex2var_epi8(high[0], i, high[1]);
        h = _mm512_ternarylogic_epi32(h, byte_codes, sign, 0xF8);  // h | (code & sign)
        if (DTYPE == INT8) h = _mm512_mask_mov_epi8(h, _mm512_cmpeq_epi8_mask(byte_codes, sign), _mm512_set1_epi8(0xC3 - 256));
        return {_mm512_permutex2var_epi8(low[0], i, low[1]), h};
    }
};

template <int64_t DTYPE>
inline LowAndHighBytes low_and_high_bf16_bytes_of_4_bit_codes(__m512i byte_codes) {
    return {_mm512_shuffle_epi8(broadcast_16_bytes(DTYPE == INT4 ? INT4_LOW : E2M1_LOW), byte_codes),
            _mm512_shuffle_epi8(broadcast_16_bytes(DTYPE == INT4 ? INT4_HIGH : E2M1_HIGH), byte_codes)};
}

struct Nibbles {
    __m512i even, odd;
    explicit Nibbles(__m512i x) {
        __m512i mask = _mm512_set1_epi8(15);
        even = _mm512_and_si512(x, mask);
        odd = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
    }
};

// Loads up to 64 bytes of a row from byte i on; past its end they are 0 and not read.
inline __m512i load_up_to_64_bytes(const uint8_t* row, int64_t i, int64_t bytes) {
    int64_t remaining = bytes - i;
    return remaining >= 64 ? _mm512_loadu_si512(row + i) : _mm512_maskz_loadu_epi8((1ull << remaining) - 1, row + i);
}

// Shuffles per lane: bytes of four tokens with four bytes each → those of one bf16 pair side by side.
alignas(16) constexpr uint8_t BY_TWO_BYTES[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
alignas(16) constexpr uint8_t BY_BYTE[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

// Stores the bf16 pairs of one 4-byte word of 16 tokens, for the columns that it holds.
template <int64_t DTYPE>
inline void store_key_pairs(__m512i words_of_16_keys, const CodeToBf16Table<DTYPE>& table, uint32_t* out) {
    LowAndHighBytes look = table.bf16_bytes_of(_mm512_shuffle_epi8(words_of_16_keys, broadcast_16_bytes(BY_TWO_BYTES)));
    _mm512_storeu_si512(out, _mm512_unpacklo_epi8(look.low, look.high));
    _mm512_storeu_si512(out + BLOCK_N, _mm512_unpackhi_epi8(look.low, look.high));
}

template <int64_t DTYPE>
inline void store_key_pairs_4_bit(__m512i words_of_16_keys, uint32_t* out) {
    Nibbles codes(_mm512_shuffle_epi8(words_of_16_keys, broadcast_16_bytes(BY_BYTE)));
    LowAndHighBytes even = low_and_high_bf16_bytes_of_4_bit_codes<DTYPE>(codes.even), odd = low_and_high_bf16_bytes_of_4_bit_codes<DTYPE>(codes.odd);
    __m512i e = _mm512_unpacklo_epi8(even.low, even.high), o = _mm512_unpacklo_epi8(odd.low, odd.high);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(e, o));
    _mm512_storeu_si512(out + BLOCK_N, _mm512_unpackhi_epi16(e, o));
    e = _mm512_unpackhi_epi8(even.low, even.high), o = _mm512_unpackhi_epi8(odd.low, odd.high);
    _mm512_storeu_si512(out + 2 * BLOCK_N, _mm512_unpacklo_epi16(e, o));
    _mm512_storeu_si512(out + 3 * BLOCK_N, _mm512_unpackhi_epi16(e, o));
}

template <int64_t DTYPE>
void unpack_and_transpose_keys_bf16(const Rows& rows, int64_t columns, uint32_t* out) {
    constexpr int UNITS = 16 / bits_of(DTYPE);  // bf16 pairs in four bytes
    const CodeToBf16Table<is_4_bit(DTYPE) || DTYPE == BF16 ? E4M3 : DTYPE> table;
    int64_t bytes = columns * bits_of(DTYPE) / 8;
    for (int64_t t = 0; t < rows.count; t += 16) {
        for (int64_t i = 0; i < bytes; i += 64) {
            VecF r[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                r[j] = (VecF)load_up_to_64_bytes(rows.of(t + j < rows.count ? t + j : rows.count - 1), i, bytes);
                rows.ahead->prefetch_line();
            }
            transpose(r);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                if (i + 4 * j >= bytes) break;
                uint32_t* to = out + (i / 4 + j) * UNITS * BLOCK_N + t;
                if constexpr (DTYPE == BF16) _mm512_storeu_si512(to, (__m512i)r[j]);
                else if constexpr (is_4_bit(DTYPE)) store_key_pairs_4_bit<DTYPE>((__m512i)r[j], to);
                else store_key_pairs<DTYPE>((__m512i)r[j], table, to);
            }
        }
    }
}

// Byte permutations of two rows, so that unpacking lane by lane leaves columns in order.
struct ValueByteOrders {
    uint8_t of_8_bit[64], of_4_bit[64];
    uint16_t of_16_bit[2][32];
    constexpr ValueByteOrders() : of_8_bit(), of_4_bit(), of_16_bit() {
        for (int lane = 0; lane < 4; lane++) {
            for (int i = 0; i < 16; i++) {
                of_8_bit[16 * lane + i] = i / 4 * 16 + 4 * lane + i % 4;
                of_4_bit[16 * lane + i] = i / 2 * 8 + 2 * lane + i % 2;
            }
        }
        for (int i = 0; i < 64; i++) of_16_bit[i / 32][i % 32] = i / 2 + i % 2 * 32;
    }
};
alignas(64) constexpr ValueByteOrders VALUE_BYTE_ORDERS;

inline void store_inside_row(__m512i x, uint32_t* out, int64_t c, int64_t columns) {
    if (c < columns) _mm512_storeu_si512(out + c, x);
}

template <int64_t DTYPE>
inline void store_value_pairs(__m512i a, __m512i b, const CodeToBf16Table<DTYPE>& table, uint32_t* out, int64_t c, int64_t columns) {
    __m512i order = _mm512_loadu_si512(VALUE_BYTE_ORDERS.of_8_bit);
    a = _mm512_permutexvar_epi8(order, a), b = _mm512_permutexvar_epi8(order, b);
    LowAndHighBytes first = table.bf16_bytes_of(_mm512_unpacklo_epi8(a, b)), second = table.bf16_bytes_of(_mm512_unpackhi_epi8(a, b));
    store_inside_row(_mm512_unpacklo_epi8(first.low, first.high), out, c, columns);
    store_inside_row(_mm512_unpackhi_epi8(first.low, first.high), out, c + 16, columns);
    store_inside_row(_mm512_unpacklo_epi8(second.low, second.high), out, c + 32, columns);
    store_inside_row(_mm512_unpackhi_epi8(second.low, second.high), out, c + 48, columns);
}

template <int64_t DTYPE>
inline void store_value_pairs_4_bit(__m512i a, __m512i b, uint32_t* out, int64_t c, int64_t columns) {
    __m512i order = _mm512_loadu_si512(VALUE_BYTE_ORDERS.of_4_bit);
    Nibbles x(_mm512_permutexvar_epi8(order, a)), y(_mm512_permutexvar_epi8(order, b));
    for (int half = 0; half < 2; half++, c += 64) {
        LowAndHighBytes p = low_and_high_bf16_bytes_of_4_bit_codes<DTYPE>(half ? _mm512_unpackhi_epi8(x.even, x.odd) : _mm512_unpacklo_epi8(x.even, x.odd));
        LowAndHighBytes q = low_and_high_bf16_bytes_of_4_bit_codes<DTYPE>(half ? _mm512_unpackhi_epi8(y.even, y.odd) : _mm512_unpacklo_epi8(y.even, y.odd));
        __m512i v = _mm512_unpacklo_epi8(p.low, p.high), w = _mm512_unpacklo_epi8(q.low, q.high);
        store_inside_row(_mm512_unpacklo_epi16(v, w), out, c, columns);
        store_inside_row(_mm512_unpackhi_epi16(v, w), out, c + 16, columns);
        v = _mm512_unpackhi_epi8(p.low, p.high), w = _mm512_unpackhi_epi8(q.low, q.high);
        store_inside_row(_mm512_unpacklo_epi16(v, w), out, c + 32, columns);
        store_inside_row(_mm512_unpackhi_epi16(v, w), out, c + 48, columns);
    }
}

template <int64_t DTYPE>
void unpack_values_bf16(const Rows& rows, int64_t columns, uint32_t* out, int64_t stride) {
    const CodeToBf16Table<is_4_bit(DTYPE) || DTYPE == BF16 ? E4M3 : DTYPE> table;
    int64_t bytes = columns * bits_of(DTYPE) / 8;
    for (int64_t t = 0; t < rows.count; t += 2, out += stride) {
        const uint8_t* first = rows.of(t);
        const uint8_t* second = t + 1 < rows.count ? rows.of(t + 1) : nullptr;
        for (int64_t i = 0; i < bytes; i += 64) {
            __m512i a = load_up_to_64_bytes(first, i, bytes), b = second ? load_up_to_64_bytes(second, i, bytes) : _mm512_setzero_si512();
            rows.ahead->prefetch_line(), rows.ahead->prefetch_line();
            int64_t c = i * 8 / bits_of(DTYPE);
            if constexpr (DTYPE == BF16) {
                store_inside_row(_mm512_permutex2var_epi16(a, _mm512_loadu_si512(VALUE_BYTE_ORDERS.of_16_bit[0]), b), out, c, columns);
                store_inside_row(_mm512_permutex2var_epi16(a, _mm512_loadu_si512(VALUE_BYTE_ORDERS.of_16_bit[1]), b), out, c + 16, columns);
            } else if constexpr (is_4_bit(DTYPE)) {
                store_value_pairs_4_bit<DTYPE>(a, b, out, c, columns);
            } else {
                store_value_pairs<DTYPE>(a, b, table, out, c, columns);
            }
        }
    }
}

#define BF16_BY_DTYPE(dtype, f, ...)               \
    switch (dtype) {                                   \
        case BF16: return f<BF16>(__VA_ARGS__);        \
        case E4M3: return f<E4M3>(__VA_ARGS__);        \
        case E5M2: return f<E5M2>(__VA_ARGS__);        \
        case INT8: return f<INT8>(__VA_ARGS__);        \
        case E2M1: return f<E2M1>(__VA_ARGS__);        \
        case INT4: return f<INT4>(__VA_ARGS__);        \
    }

inline void pack_keys(Bf16Packing, int64_t dtype, const Rows& rows, int64_t columns, uint32_t* out) {
    BF16_BY_DTYPE(dtype, unpack_and_transpose_keys_bf16, rows, columns, out)
}

inline void pack_values(Bf16Packing, int64_t dtype, const Rows& rows, int64_t columns, uint32_t* out, int64_t stride) {
    BF16_BY_DTYPE(dtype, unpack_values_bf16, rows, columns, out, stride)
}

}  // namespace
#endif
