// C [M, N] = or += factor[n] × A [M, K] × B [K, N], for tiles that lie in a core's caches.
//
// A and B hold units of four bytes: floats, or pairs of bf16 numbers whose products are summed in fp32. N is a multiple
// of W, the rows of B and C are dense vectors; A's units are broadcast.
#pragma once

#include "simd.h"

namespace {

struct Floats {
    static constexpr int VALUES = 1;  // a unit's
    static VecF madd(VecF sum, uint32_t a, const uint32_t* b) {
        return fma(all(from_bits(a)), load<VecF>(b), sum);
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_PAIRS 1
struct Pairs {
    static constexpr int VALUES = 2;
    static VecF madd(VecF sum, uint32_t a, const uint32_t* b) {
        __m512i each = _mm512_set1_epi32(static_cast<int>(a)), column = _mm512_loadu_si512(b);
        return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)each, (__m512bh)column);
    }
};
#else
#define HAS_PAIRS 0
#endif

inline uint32_t unit_of(Floats, const float* x) { return bits(x[0]); }
#if HAS_PAIRS
inline uint32_t unit_of(Pairs, const float* x) { return bits(x[0]) >> 16 | (bits(x[1]) & 0xFFFF0000); }
#endif

struct Operands {
    const uint32_t* a;
    int64_t a_stride;
    const uint32_t* b;
    int64_t b_stride;
    float* c;
    int64_t c_stride;
    int64_t depth;        // K, in units
    const float* factor;  // [N], or null
    bool add;
};

template <class Unit, int ROWS, int VECTORS>
inline void block(const Operands& o, int64_t m, int64_t n) {
    VecF sum[ROWS][VECTORS] = {};
    const uint32_t* a = o.a + m * o.a_stride;
    const uint32_t* b = o.b + n;
    for (int64_t k = 0; k < o.depth; k++, b += o.b_stride) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) sum[i][j] = Unit::madd(sum[i][j], a[i * o.a_stride + k], b + j * W);
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

template <class Unit, int VECTORS>
inline void column(const Operands& o, int64_t rows, int64_t n) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) block<Unit, 4, VECTORS>(o, m, n);
    if (rows - m == 3) block<Unit, 3, VECTORS>(o, m, n);
    if (rows - m == 2) block<Unit, 2, VECTORS>(o, m, n);
    if (rows - m == 1) block<Unit, 1, VECTORS>(o, m, n);
}

template <class Unit>
void multiply(const Operands& o, int64_t rows, int64_t columns) {
    // Sums of 4 × MOST vectors, a row of B and a unit of A fill the registers.
    constexpr int MOST = W == 16 ? 4 : 2;
    int64_t n = 0;
    for (; n + MOST * W <= columns; n += MOST * W) column<Unit, MOST>(o, rows, n);
    if (MOST > 2 && columns - n >= 2 * W) column<Unit, 2>(o, rows, n), n += 2 * W;
    if (columns - n >= W) column<Unit, 1>(o, rows, n);
}

}  // namespace
