// Probabilities of a tile → weights, in the units that values are multiplied in.
#pragma once

#include "gemm.h"

namespace {

// Probabilities times the factors of the values. What is not seen stays 0, whatever its factor.
inline VecF weights_at(const float* p, const float* factors, int64_t t) {
    VecF x = load<VecF>(p + t);
    return factors == nullptr ? x : x == 0.0f ? VecF{} : x * load<VecF>(factors + t);
}

// Weights as units. `sum` grows by them where units round; then the answer is whether one of them has more than a
// sixteenth of it: its rounding error would show, where many small ones cancel, and `pack_rest` is wanted.
inline bool pack_weights(Floats, const float* p, const float* factors, int64_t padded, uint32_t* out, float&) {
    for (int64_t t = 0; t < padded; t += W) store(out + t, weights_at(p, factors, t));
    return false;
}

// What rounding took from the weights.
inline void pack_rest(Floats, const float*, const float*, int64_t, uint32_t*) {}

inline float dot(Floats, const uint32_t* a, const uint32_t* b, int64_t padded) {
    VecF total = {};
    for (int64_t t = 0; t < padded; t += W) total = fma(load<VecF>(a + t), load<VecF>(b + t), total);
    return sum(total);
}

#if HAS_PAIRS
inline VecF rounded(VecF x) {
    return (VecF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
}

inline bool pack_weights(Pairs, const float* p, const float* factors, int64_t padded, uint32_t* out, float& sum) {
    VecF total = {}, most = {};
    for (int64_t t = 0; t < padded; t += W) {
        VecF x = weights_at(p, factors, t), magnitude = (VecF)((VecI)x & 0x7FFFFFFF);
        _mm256_storeu_si256((__m256i*)(out + t / 2), (__m256i)_mm512_cvtneps_pbh((__m512)x));
        total += magnitude;
        most = larger(magnitude, most);
    }
    sum += _mm512_reduce_add_ps((__m512)total);
    return _mm512_cmp_ps_mask((__m512)(most * 16.0f), _mm512_set1_ps(sum), _CMP_GT_OQ) != 0;
}

inline void pack_rest(Pairs, const float* p, const float* factors, int64_t padded, uint32_t* out) {
    for (int64_t t = 0; t < padded; t += W) {
        VecF x = weights_at(p, factors, t);
        _mm256_storeu_si256((__m256i*)(out + t / 2), (__m256i)_mm512_cvtneps_pbh((__m512)(x - rounded(x))));
    }
}

inline float dot(Pairs, const uint32_t* a, const uint32_t* b, int64_t padded) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t t = 0; t < padded; t += 32) {
        __mmask16 there = padded - t >= 32 ? 0xFFFF : 0xFF;
        __m512i x = _mm512_maskz_loadu_epi32(there, a + t / 2), y = _mm512_maskz_loadu_epi32(there, b + t / 2);
        total = _mm512_dpbf16_ps(total, (__m512bh)x, (__m512bh)y);
    }
    return _mm512_reduce_add_ps(total);
}
#endif

}  // namespace
