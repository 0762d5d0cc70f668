// Scores of a tile → probabilities, row by row, with a running maximum and sum.
#pragma once

#include "tile.h"

namespace {

constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// Which keys of a request its draft rows see.
struct Sight {
    int64_t keys, first;  // number of keys; position of the first draft
    int64_t window;       // 0: all
    const char* mask;     // of the request's first row; null: causal
    int64_t mask_stride;

    // Keys [low, high) are seen by a draft, but for those that its mask hides.
    int64_t low(int64_t draft) const {
        int64_t k = window ? first + draft - window + 1 : 0;
        return k > 0 ? k : 0;
    }
    int64_t high(int64_t draft) const {
        int64_t k = mask ? keys : first + draft + 1;
        return k < keys ? k : keys;
    }
    bool hidden(int64_t draft, int64_t key) const {
        int64_t j = key - first;
        return j >= 0 && !(load<uint16_t>(mask + draft * mask_stride + j / 16 * 2) >> (j % 16) & 1);
    }
    // Whether drafts [from, to] see all of the keys [begin, end).
    bool whole(int64_t from, int64_t to, int64_t begin, int64_t end) const {
        return begin >= low(to) && end <= (mask && first < keys ? first : high(from));
    }
};

// −inf for the keys of a tile that begins with `begin` that a draft does not see.
inline void hide(float* s, const Sight& sight, int64_t draft, int64_t begin, int64_t count) {
    int64_t low = sight.low(draft) - begin, high = sight.high(draft) - begin;
    for (int64_t t = 0; t < count; t++)
        if (t < low || t >= high || (sight.mask && sight.hidden(draft, begin + t))) s[t] = NEGATIVE_INFINITY;
}

struct Running {
    float top, total;  // the maximum in units of ln 2, the sum
};

// s [padded] becomes its probabilities against the maximum up to now; returns what older ones must be multiplied with.
inline float advance(float* s, int64_t padded, Running& r) {
    VecF most = all(r.top);
    for (int64_t t = 0; t < padded; t += W) most = larger(load<VecF>(s + t), most);
    float top = largest(most);
    VecF base = all(top == NEGATIVE_INFINITY ? 0.0f : top);  // nothing seen yet: −inf − −inf would be NaN
    VecF total = {};
    for (int64_t t = 0; t < padded; t += W) {
        VecF p = exp2(load<VecF>(s + t) - base);
        store(s + t, p);
        total += p;
    }
    float old = 1.0f;
    if (top != r.top) old = r.top == NEGATIVE_INFINITY ? 0.0f : exp2(all(r.top - top))[0];
    r.total = r.total * old + sum(total);
    r.top = top;
    return old;
}

// cap × tanh(s / cap) × log2(e)
inline void bend(float* s, int64_t padded, float cap) {
    for (int64_t t = 0; t < padded; t += W) {
        VecF score = load<VecF>(s + t), x = score / cap, a = (VecF)((VecI)x & 0x7FFFFFFF);
        VecF e = exp2(a * (-2 * LOG2E)), y = (1.0f - e) / (1.0f + e);
        // Where the difference would lose digits, the series: its next term is below 1e-8 of it. Of the score itself: a
        // large cap leaves no digits in their quotient.
        VecF square = x * x, series = score * (1.0f - square * (1.0f / 3 - square * (2.0f / 15)));
        y = (VecF)((VecI)y | ((VecI)x & INT32_MIN));
        store(s + t, a < 0.02f ? series * LOG2E : y * (cap * LOG2E));
    }
}

}  // namespace
