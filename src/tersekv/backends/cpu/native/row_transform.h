// Hadamard rotation and channel scales of caches: applied to appended rows and queries, undone in outputs.
#pragma once

#include "numbers.h"

namespace {

constexpr int64_t MAX_TRANSFORMED_COLUMNS = 576;  // most columns of a row that attention rotates

inline bool is_transformed(const RowTransform& t) { return t.signs >= 0 || t.channels >= 0; }

// Multiplies x by Sylvester's Hadamard matrix / sqrt(b), in blocks of b columns. Appends fix each step and their order.
inline void normalized_block_hadamard(float* x, int64_t columns, int64_t block) {
    float by = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block)));
    for (float* y = x; y < x + columns; y += block) {
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t i = 0; i < block; i += 2 * h)
                for (int64_t j = i; j < i + h; j++) {
                    float first = y[j], second = y[j + h];
                    y[j] = first + second;
                    y[j + h] = first - second;
                }
        for (int64_t i = 0; i < block; i++) y[i] *= by;
    }
}

inline void apply_signs(const RowTransform& t, Addresses at, float* x, int64_t n) {
    const char* signs = at[t.signs];
    for (int64_t i = 0; i < n; i += t.block)
        for (int64_t j = 0; j < t.block; j++) x[i + j] *= load<float>(signs + 4 * j);
}

inline void rotate_row(const RowTransform& t, Addresses at, float* x, int64_t n) {
    if (t.block == 0) return;
    if (t.signs >= 0) apply_signs(t, at, x, n);
    normalized_block_hadamard(x, n, t.block);
}

// Scales and rotates a row of a KV head for quantization.
inline void divide_by_channel_scales_and_rotate(const RowTransform& t, Addresses at, int64_t head, float* x, int64_t n) {
    if (t.channels >= 0) {
        const char* scale = at[t.channels] + head * t.stride;
        for (int64_t i = 0; i < n; i++) x[i] *= 1.0f / load<float>(scale + 4 * i);
    }
    rotate_row(t, at, x, n);
}

inline void apply_channel_scales(const RowTransform& t, Addresses at, int64_t head, float* x, int64_t n) {
    if (t.channels < 0) return;
    const char* scale = at[t.channels] + head * t.stride;
    for (int64_t i = 0; i < n; i++) x[i] *= load<float>(scale + 4 * i);
}

// Scales and rotates a query to match the stored keys of a KV head.
inline void scale_and_rotate_query(const RowTransform& t, Addresses at, int64_t head, float* x, int64_t n) {
    apply_channel_scales(t, at, head, x, n);
    rotate_row(t, at, x, n);
}

// Undoes rotation and channel scales of V in an output of a KV head.
inline void unrotate_and_scale_output(const RowTransform& t, Addresses at, int64_t head, float* x, int64_t n) {
    if (t.signs >= 0) {
        normalized_block_hadamard(x, n, t.block);
        apply_signs(t, at, x, n);
    }
    apply_channel_scales(t, at, head, x, n);
}

}  // namespace
