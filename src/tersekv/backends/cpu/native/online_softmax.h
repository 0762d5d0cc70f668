// Mask, softcap and online softmax of a tile: scores → probabilities P, row by row, with a row_max and row_sum.
#pragma once

#include "unpack.h"

namespace {

constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// Visible keys of a request's draft rows.
struct MaskArgs {
    int64_t keys, first;  // number of keys; position of the first draft
    int64_t window;       // 0: all
    const char* mask;     // of the request's first row; null: causal
    int64_t mask_stride;

    // Keys [first_visible, visible_end) are visible to a draft, except where its mask bit is 0.
    int64_t first_visible(int64_t draft) const {
        int64_t k = window ? first + draft - window + 1 : 0;
        return k > 0 ? k : 0;
    }
    int64_t visible_end(int64_t draft) const {
        int64_t k = mask ? keys : first + draft + 1;
        return k < keys ? k : keys;
    }
    bool masked_out(int64_t draft, int64_t key) const {
        int64_t j = key - first;
        return j >= 0 && !(load<uint16_t>(mask + draft * mask_stride + j / 16 * 2) >> (j % 16) & 1);
    }
    // Returns whether keys [begin, end) are unmasked for all drafts [from, to].
    bool all_visible(int64_t from, int64_t to, int64_t begin, int64_t end) const {
        return begin >= first_visible(to) && end <= (mask && first < keys ? first : visible_end(from));
    }
};

// Sets the scores of masked keys to −inf, in a tile that starts at key `begin`.
inline void apply_mask(float* s, const MaskArgs& mask_args, int64_t draft, int64_t begin, int64_t count) {
    int64_t low = mask_args.first_visible(draft) - begin, high = mask_args.visible_end(draft) - begin;
    for (int64_t t = 0; t < count; t++)
        if (t < low || t >= high || (mask_args.mask && mask_args.masked_out(draft, begin + t))) s[t] = NEGATIVE_INFINITY;
}

struct SoftmaxState {
    float top, total;  // row_max × log2(e), row_sum
};

// Turns scores_times_log2e s [padded] into P against the new row_max, in place. Returns the rescale of older acc_o.
inline float online_softmax_step(float* scores_times_log2e, int64_t padded_keys, SoftmaxState& state) {
    VecF most = broadcast(state.top);
    for (int64_t t = 0; t < padded_keys; t += W) most = max_nan_last(load<VecF>(scores_times_log2e + t), most);
    float top = reduce_max(most);
    VecF base = broadcast(top == NEGATIVE_INFINITY ? 0.0f : top);  // all masked so far: −inf − −inf would be NaN
    VecF total = {};
    for (int64_t t = 0; t < padded_keys; t += W) {
        VecF p = exp2_of_nonpositive(load<VecF>(scores_times_log2e + t) - base);
        store(scores_times_log2e + t, p);
        total += p;
    }
    float old = 1.0f;
    if (top != state.top) old = state.top == NEGATIVE_INFINITY ? 0.0f : exp2_of_nonpositive(broadcast(state.top - top))[0];
    state.total = state.total * old + reduce_add(total);
    state.top = top;
    return old;
}

// cap × tanh(s / cap) × log2(e)
inline void apply_softcap_times_log2e(float* scores, int64_t padded_keys, float softcap) {
    for (int64_t t = 0; t < padded_keys; t += W) {
        VecF score = load<VecF>(scores + t), x = score / softcap, a = (VecF)((VecI)x & 0x7FFFFFFF);
        VecF e = exp2_of_nonpositive(a * (-2 * LOG2E)), y = (1.0f - e) / (1.0f + e);
        // Small arguments use the series, since 1 − e cancels: its next term is below 1e-8 of it. It scales the score
        // itself: with a large softcap the quotient x loses digits.
        VecF square = x * x, series = score * (1.0f - square * (1.0f / 3 - square * (2.0f / 15)));
        y = (VecF)((VecI)y | ((VecI)x & INT32_MIN));
        store(scores + t, a < 0.02f ? series * LOG2E : y * (softcap * LOG2E));
    }
}

}  // namespace
