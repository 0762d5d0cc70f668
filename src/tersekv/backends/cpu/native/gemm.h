// C [M, N] = or += scale[n] × A [M, K] × B [K, N], for tiles in a core's caches.
//
// A and B hold packed words of four bytes: floats, or bf16 pairs whose products are summed in fp32. N is a multiple of
// W, the rows of B and C are dense vectors; A's words are broadcast.
#pragma once

#include "simd.h"

namespace {

struct Fp32Packing {
    static constexpr int VALUES = 1;  // per packed word
    static VecF madd(VecF sum, uint32_t a, const uint32_t* b) {
        return fma(broadcast(from_bits(a)), load<VecF>(b), sum);
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_BF16_PRODUCTS 1
struct Bf16Packing {
    static constexpr int VALUES = 2;
    static VecF madd(VecF sum, uint32_t a, const uint32_t* b) {
        __m512i each = _mm512_set1_epi32(static_cast<int>(a)), column = _mm512_loadu_si512(b);
        return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)each, (__m512bh)column);
    }
};
#else
#define HAS_BF16_PRODUCTS 0
#endif

inline uint32_t pack_word(Fp32Packing, const float* x) { return bits(x[0]); }
#if HAS_BF16_PRODUCTS
inline uint32_t pack_word(Bf16Packing, const float* x) { return bits(x[0]) >> 16 | (bits(x[1]) & 0xFFFF0000); }
#endif

struct Operands {
    const uint32_t* a;
    int64_t a_stride;
    const uint32_t* b;
    int64_t b_stride;
    float* c;
    int64_t c_stride;
    int64_t depth;        // K, in packed words
    const float* factor;  // scale [N], or null
    bool add;
};

template <class Packing, int ROWS, int VECTORS>
inline void multiply_register_tile(const Operands& o, int64_t m, int64_t n) {
    VecF sum[ROWS][VECTORS] = {};
    const uint32_t* a = o.a + m * o.a_stride;
    const uint32_t* b = o.b + n;
    for (int64_t k = 0; k < o.depth; k++, b += o.b_stride) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) sum[i][j] = Packing::madd(sum[i][j], a[i * o.a_stride + k], b + j * W);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            float* c = o.c + (m + i) * o.c_stride + n + j * W;
            VecF x = sum[i][j];
            if (o.factor != nullptr) x *= load<VecF>(o.factor + n + j * W);
            store(c, o.add ? load<VecF>(c) + x : x);
        }
    }
}

template <class Packing, int VECTORS>
inline void multiply_column_panel(const Operands& o, int64_t rows, int64_t n) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) multiply_register_tile<Packing, 4, VECTORS>(o, m, n);
    if (rows - m == 3) multiply_register_tile<Packing, 3, VECTORS>(o, m, n);
    if (rows - m == 2) multiply_register_tile<Packing, 2, VECTORS>(o, m, n);
    if (rows - m == 1) multiply_register_tile<Packing, 1, VECTORS>(o, m, n);
}

template <class Packing>
void multiply(const Operands& o, int64_t rows, int64_t columns) {
    // 4 × MOST vectors of sums, a row of B and a word of A fill the registers.
    constexpr int MOST = W == 16 ? 4 : 2;
    int64_t n = 0;
    for (; n + MOST * W <= columns; n += MOST * W) multiply_column_panel<Packing, MOST>(o, rows, n);
    if (MOST > 2 && columns - n >= 2 * W) multiply_column_panel<Packing, 2>(o, rows, n), n += 2 * W;
    if (columns - n >= W) multiply_column_panel<Packing, 1>(o, rows, n);
}

}  // namespace
