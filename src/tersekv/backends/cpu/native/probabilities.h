// Packs probabilities P of a tile for the product with the values.
#pragma once

#include "gemm.h"

namespace {

// Returns P times the scales of the values. A masked P stays 0, whatever the scale.
inline VecF scaled_p(const float* p, const float* scales, int64_t t) {
    VecF x = load<VecF>(p + t);
    return scales == nullptr ? x : x == 0.0f ? VecF{} : x * load<VecF>(scales + t);
}

// Packs scaled P. bf16 rounds it: `abs_p_sum` then accumulates |P|. Returns whether an element exceeds a 16th of it: where many
// small terms cancel its rounding error would show, and `pack_p_residual` must be added.
inline bool pack_p_and_return_needs_residual(Fp32Packing, const float* p, const float* scales, int64_t padded, uint32_t* out, float&) {
    for (int64_t t = 0; t < padded; t += W) store(out + t, scaled_p(p, scales, t));
    return false;
}

// Packs the rounding error of scaled P.
inline void pack_p_residual(Fp32Packing, const float*, const float*, int64_t, uint32_t*) {}

inline float dot(Fp32Packing, const uint32_t* a, const uint32_t* b, int64_t padded) {
    VecF total = {};
    for (int64_t t = 0; t < padded; t += W) total = fma(load<VecF>(a + t), load<VecF>(b + t), total);
    return reduce_add(total);
}

#if HAS_BF16_PRODUCTS
inline VecF round_to_bf16(VecF x) {
    return (VecF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
}

inline bool pack_p_and_return_needs_residual(Bf16Packing, const float* p, const float* scales, int64_t padded, uint32_t* out, float& abs_p_sum) {
    VecF total = {}, most = {};
    for (int64_t t = 0; t < padded; t += W) {
        VecF x = scaled_p(p, scales, t), magnitude = (VecF)((VecI)x & 0x7FFFFFFF);
        _mm256_storeu_si256((__m256i*)(out + t / 2), (__m256i)_mm512_cvtneps_pbh((__m512)x));
        total += magnitude;
        most = max_nan_last(magnitude, most);
    }
    abs_p_sum += _mm512_reduce_add_ps((__m512)total);
    return _mm512_cmp_ps_mask((__m512)(most * 16.0f), _mm512_set1_ps(abs_p_sum), _CMP_GT_OQ) != 0;
}

inline void pack_p_residual(Bf16Packing, const float* p, const float* scales, int64_t padded, uint32_t* out) {
    for (int64_t t = 0; t < padded; t += W) {
        VecF x = scaled_p(p, scales, t);
        _mm256_storeu_si256((__m256i*)(out + t / 2), (__m256i)_mm512_cvtneps_pbh((__m512)(x - round_to_bf16(x))));
    }
}

inline float dot(Bf16Packing, const uint32_t* a, const uint32_t* b, int64_t padded) {
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
