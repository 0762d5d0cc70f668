// Vectors of W floats; the instruction set that is compiled for sets W.
#pragma once

#include "numbers.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
constexpr int W = 8;
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
constexpr int W = 4;
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

typedef float VecF __attribute__((vector_size(W * 4)));
typedef int32_t VecI __attribute__((vector_size(W * 4)));
typedef uint32_t VecU __attribute__((vector_size(W * 4)));

inline VecF broadcast(float x) { return x - VecF{}; }
inline VecI broadcast(int32_t x) { return x - VecI{}; }

inline VecF fma(VecF a, VecF b, VecF c) {
#if defined(__AVX512F__)
    return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline VecF max_nan_last(VecF a, VecF b) { return a > b ? a : b; }  // b where either is NaN

inline float reduce_max(VecF x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float top = x[0];
    for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
    return top;
}

inline float reduce_add(VecF x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float total = x[0];
    for (int i = 1; i < W; i++) total += x[i];
    return total;
}

// 2^x for x <= 0, within 2e-7; results below 2^-126 may be flushed to 0. NaN stays NaN.
inline VecF exp2_of_nonpositive(VecF x) {
#if defined(__AVX512F__)
    // `max` returns its second operand if one is NaN.
    __m512 low = _mm512_max_ps(_mm512_set1_ps(-160.0f), (__m512)x);
    __m512 whole = _mm512_roundscale_ps(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    VecF f = (VecF)_mm512_sub_ps(low, whole);
#else
    const VecF magic = broadcast(12582912.0f);  // 1.5 × 2^23: adding it rounds to an integer
    VecF low = x < -126.0f ? broadcast(-126.0f) : x;
    VecF shifted = low + magic, f = low - (shifted - magic);
#endif
    VecF p = broadcast(1.5345810e-4f);
    p = fma(p, f, broadcast(1.3399931e-3f));
    p = fma(p, f, broadcast(9.6184891e-3f));
    p = fma(p, f, broadcast(5.5503286e-2f));
    p = fma(p, f, broadcast(2.4022646e-1f));
    p = fma(p, f, broadcast(6.9314718e-1f));
    p = fma(p, f, broadcast(1.0f));
#if defined(__AVX512F__)
    return (VecF)_mm512_scalef_ps((__m512)p, whole);
#else
    VecF y = (VecF)((VecI)p + (((VecI)shifted - (VecI)magic) << 23));
    y = x < -126.0f ? VecF{} : y;
    return x == x ? y : x;
#endif
}

// Transposes a W × W block.
inline void transpose(VecF (&r)[W]) {
#if defined(__clang__)
#define ZIP(a, b, ORDER) __builtin_shufflevector(a, b, ORDER)
#else
#define ZIP(a, b, ORDER) __builtin_shuffle(a, b, VecI{ORDER})
#endif
    constexpr int LEVELS = W == 16 ? 4 : W == 8 ? 3 : 2;
#pragma GCC unroll 4
    for (int level = 0; level < LEVELS; level++) {
        VecF s[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; i++) {
            s[2 * i] = ZIP(r[i], r[i + W / 2], ZIP_LOW);
            s[2 * i + 1] = ZIP(r[i], r[i + W / 2], ZIP_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) r[i] = s[i];
    }
#undef ZIP
}

}  // namespace
