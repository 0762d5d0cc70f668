// Rotated rows and channel scales of K/V caches: of rows that are appended, of queries, and back in outputs.
#pragma once

#include "numbers.h"

namespace {

constexpr int64_t LONGEST_TURN = 576;  // columns of a row that attention turns

inline bool turns(const Turn& t) { return t.signs >= 0 || t.channels >= 0; }

// Times Sylvester's Hadamard matrix / sqrt(b), in blocks of b columns. For an append each step and their order is law.
inline void butterflies(float* x, int64_t n, int64_t b) {
    float by = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(b)));
    for (float* y = x; y < x + n; y += b) {
        for (int64_t h = 1; h < b; h *= 2)
            for (int64_t i = 0; i < b; i += 2 * h)
                for (int64_t j = i; j < i + h; j++) {
                    float first = y[j], second = y[j + h];
                    y[j] = first + second;
                    y[j + h] = first - second;
                }
        for (int64_t i = 0; i < b; i++) y[i] *= by;
    }
}

inline void times_signs(const Turn& t, Addresses at, float* x, int64_t n) {
    const char* signs = at[t.signs];
    for (int64_t i = 0; i < n; i += t.block)
        for (int64_t j = 0; j < t.block; j++) x[i + j] *= load<float>(signs + 4 * j);
}

inline void rotate_row(const Turn& t, Addresses at, float* x, int64_t n) {
    if (t.signs < 0) return;
    times_signs(t, at, x, n);
    butterflies(x, n, t.block);
}

// A row of a KV head as it is quantised.
inline void turn_row(const Turn& t, Addresses at, int64_t head, float* x, int64_t n) {
    if (t.channels >= 0) {
        const char* scale = at[t.channels] + head * t.stride;
        for (int64_t i = 0; i < n; i++) x[i] *= 1.0f / load<float>(scale + 4 * i);
    }
    rotate_row(t, at, x, n);
}

inline void times_channels(const Turn& t, Addresses at, int64_t head, float* x, int64_t n) {
    if (t.channels < 0) return;
    const char* scale = at[t.channels] + head * t.stride;
    for (int64_t i = 0; i < n; i++) x[i] *= load<float>(scale + 4 * i);
}

// A query as it meets the stored keys of a KV head.
inline void turn_query(const Turn& t, Addresses at, int64_t head, float* x, int64_t n) {
    times_channels(t, at, head, x, n);
    rotate_row(t, at, x, n);
}

// Weighted stored values of a KV head as the values that they stand for.
inline void turn_back(const Turn& t, Addresses at, int64_t head, float* x, int64_t n) {
    if (t.signs >= 0) {
        butterflies(x, n, t.block);
        times_signs(t, at, x, n);
    }
    times_channels(t, at, head, x, n);
}

}  // namespace
