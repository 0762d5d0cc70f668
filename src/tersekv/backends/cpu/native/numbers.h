// Conversions of every dtype from and to fp32, one number at a time and branch-free, so that loops vectorise. Each
// rounds once, to nearest even; this file is compiled without fused multiply-add.
#pragma once

#include <stdint.h>
#include <string.h>

#include "api.h"

namespace {

inline uint32_t bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

inline float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

constexpr uint32_t INFINITE = 0x7F800000;  // bits of +inf; a larger magnitude is NaN
constexpr float NEGATIVE_INFINITY = -__builtin_inff();

template <class T>
inline T load(const void* p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}

template <class T>
inline void store(void* p, T x) {
    memcpy(p, &x, sizeof x);
}

inline uint16_t to_bf16(float x) {
    uint32_t u = bits(x), rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((u & 0x7FFFFFFF) > INFINITE ? (u >> 16) | 0x7FC0 : rounded);
}

inline float from_bf16(uint16_t u) { return from_bits(static_cast<uint32_t>(u) << 16); }

// fp32 → a float of EXPONENT and MANTISSA bits, saturating at `limit` (fp32 bits). Below the smallest normal number
// a sum with `magic`, whose last bit is worth the smallest subnormal, does the rounding.
template <int EXPONENT, int MANTISSA>
inline uint32_t to_minifloat(uint32_t magnitude_bits, uint32_t limit_bits) {
    constexpr int BIAS = (1 << (EXPONENT - 1)) - 1, DROPPED = 23 - MANTISSA;
    constexpr uint32_t SMALLEST_NORMAL = static_cast<uint32_t>(127 - BIAS + 1) << 23;
    constexpr uint32_t MAGIC = static_cast<uint32_t>(127 - BIAS + 1 - MANTISSA + 23) << 23;
    uint32_t a = magnitude_bits < limit_bits ? magnitude_bits : limit_bits;
    uint32_t normal = ((a + ((1u << (DROPPED - 1)) - 1) + ((a >> DROPPED) & 1)) >> DROPPED) - ((127u - BIAS) << MANTISSA);
    uint32_t subnormal = bits(from_bits(a) + from_bits(MAGIC)) - MAGIC;
    return a < SMALLEST_NORMAL ? subnormal : normal;
}

inline uint16_t to_f16(float x) {
    uint32_t u = bits(x), a = u & 0x7FFFFFFF;
    uint32_t code = to_minifloat<5, 10>(a, 0x47800000);  // 65536, which gives the bits of inf
    return static_cast<uint16_t>(((u >> 16) & 0x8000) | (a > INFINITE ? 0x7E00 : code));
}

inline float from_f16(uint16_t h) {
    uint32_t a = (h & 0x7FFFu) << 13, sign = (h & 0x8000u) << 16;
    // Read as fp32 these bits are 2^112 too small, subnormals included.
    float value = from_bits(a) * from_bits((127 + 112) << 23);
    return from_bits((a >= 0x7C00u << 13 ? a + (112u << 23) + (112u << 23) : bits(value)) | sign);
}

// To e4m3 and e5m2: saturating; NaN becomes 0x7F whatever its sign, as on GPUs.
inline uint8_t to_e4m3(float x) {
    uint32_t u = bits(x), a = u & 0x7FFFFFFF;
    uint32_t code = to_minifloat<4, 3>(a, 0x43E00000);  // 448
    return static_cast<uint8_t>(a > INFINITE ? 0x7F : ((u >> 24) & 0x80) | code);
}

inline uint8_t to_e5m2(float x) {
    uint32_t u = bits(x), a = u & 0x7FFFFFFF;
    uint32_t code = to_minifloat<5, 2>(a, 0x47600000);  // 57344
    return static_cast<uint8_t>(a > INFINITE ? 0x7F : ((u >> 24) & 0x80) | code);
}

// fp32 → int8: to nearest, halves away from zero, saturating; NaN becomes 0.
inline int8_t to_int8(float x) {
    x = x == x ? x : 0.0f;
    x = x < -129.0f ? -129.0f : x > 128.0f ? 128.0f : x;
    int32_t whole = static_cast<int32_t>(x);
    // Adding 0.5 to 0.49999997 would carry it up to 1; this difference is exact.
    float rest = x - static_cast<float>(whole);
    whole += (rest >= 0.5f) - (rest <= -0.5f);
    return static_cast<int8_t>(whole < -128 ? -128 : whole > 127 ? 127 : whole);
}

// fp32 → e2m1: to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code, saturating; bit 3 is the sign; NaN
// becomes 0.
inline uint8_t to_e2m1(float x) {
    uint32_t u = bits(x);
    float a = from_bits(u & 0x7FFFFFFF);
    int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return static_cast<uint8_t>(x == x ? code | ((u >> 28) & 8) : 0);
}

// fp32 → int4: trunc(x + 0.5) clamped to [0, 15]; NaN becomes 0.
inline uint8_t to_int4(float x) {
    x += 0.5f;
    x = x > 0.0f ? x : 0.0f;
    return static_cast<uint8_t>(static_cast<int32_t>(x < 15.0f ? x : 15.0f));
}

// Values of all codes of the 8-bit floats and of the 16 codes of e2m1.
constexpr float power(int n) { return n < 0 ? power(n + 1) / 2 : n > 0 ? power(n - 1) * 2 : 1.0f; }

template <int EXPONENT, int MANTISSA>
constexpr float minifloat_value(int code) {
    int bias = (1 << (EXPONENT - 1)) - 1, last = (1 << EXPONENT) - 1;
    int e = (code >> MANTISSA) & last, m = code & ((1 << MANTISSA) - 1);
    float magnitude = e == 0 ? m * power(1 - bias - MANTISSA) : ((1 << MANTISSA) + m) * power(e - bias - MANTISSA);
    if (EXPONENT == 5 && e == last) magnitude = m ? __builtin_nanf("") : __builtin_inff();
    if (EXPONENT == 4 && (code & 0x7F) == 0x7F) magnitude = __builtin_nanf("");
    return code >> (EXPONENT + MANTISSA) & 1 ? -magnitude : magnitude;
}

template <int EXPONENT, int MANTISSA>
struct Values {
    float of[1 << (1 + EXPONENT + MANTISSA)];
    constexpr Values() : of() {
        for (int i = 0; i < (1 << (1 + EXPONENT + MANTISSA)); i++) of[i] = minifloat_value<EXPONENT, MANTISSA>(i);
    }
};
constexpr Values<4, 3> E4M3_VALUES;
constexpr Values<5, 2> E5M2_VALUES;
constexpr float E2M1_VALUES[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
// int4 codes are decoded minus INT4_MIDDLE, so that their sums stay small; a row's shift (unpack.h) corrects it.
constexpr float INT4_MIDDLE = 8;
constexpr float INT4_VALUES[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

// n dense numbers of a dtype → fp32.
inline void read_floats(const char* p, int64_t dtype, float* out, int64_t n) {
    const uint8_t* b = reinterpret_cast<const uint8_t*>(p);
    switch (dtype) {
        case F32: memcpy(out, p, n * 4); break;
        case BF16: for (int64_t i = 0; i < n; i++) out[i] = from_bf16(load<uint16_t>(p + 2 * i)); break;
        case F16: for (int64_t i = 0; i < n; i++) out[i] = from_f16(load<uint16_t>(p + 2 * i)); break;
        case E4M3: for (int64_t i = 0; i < n; i++) out[i] = E4M3_VALUES.of[b[i]]; break;
        case E5M2: for (int64_t i = 0; i < n; i++) out[i] = E5M2_VALUES.of[b[i]]; break;
    }
}

// n fp32 numbers → dense ones of a dtype; 8-bit ones saturate.
inline void write_floats(const float* x, int64_t dtype, char* p, int64_t n) {
    switch (dtype) {
        case F32: memcpy(p, x, n * 4); break;
        case BF16: for (int64_t i = 0; i < n; i++) store(p + 2 * i, to_bf16(x[i])); break;
        case F16: for (int64_t i = 0; i < n; i++) store(p + 2 * i, to_f16(x[i])); break;
        case E4M3: for (int64_t i = 0; i < n; i++) store(p + i, to_e4m3(x[i])); break;
        case E5M2: for (int64_t i = 0; i < n; i++) store(p + i, to_e5m2(x[i])); break;
    }
}

// Rounds n numbers to a 16-bit dtype; F32: leaves them.
inline void round_floats(float* x, int64_t dtype, int64_t n) {
    if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) x[i] = from_bf16(to_bf16(x[i]));
    else if (dtype == F16)
        for (int64_t i = 0; i < n; i++) x[i] = from_f16(to_f16(x[i]));
}

// a − b and a × b of unchecked numbers, saturating on overflow.
inline int64_t saturating_difference(int64_t a, int64_t b) {
    int64_t out;
    return __builtin_sub_overflow(a, b, &out) ? INT64_MAX : out;
}
inline int64_t saturating_product(int64_t a, int64_t b) {
    int64_t out;
    return __builtin_mul_overflow(a, b, &out) ? INT64_MAX : out;
}

inline int64_t read_index(const char* p, int64_t dtype, int64_t i) {
    if (dtype == I64) return load<int64_t>(p + 8 * i);
    return dtype == I32 ? static_cast<int64_t>(load<int32_t>(p + 4 * i)) : static_cast<int64_t>(load<uint32_t>(p + 4 * i));
}

}  // namespace
