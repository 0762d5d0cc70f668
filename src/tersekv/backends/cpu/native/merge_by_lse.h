// Merges partial attention results, weighted by the exponentials of their LSE.
#pragma once

#include <math.h>

#include "thread_pool.h"
#include "simd.h"

namespace {

struct MergeRun {
    const Merge& c;
    Addresses at;
    int64_t share;  // rows of a work item

    static void merge_rows_of_item(void* context, int64_t item) {
        const MergeRun& self = *static_cast<MergeRun*>(context);
        int64_t all_rows = self.c.rows * self.c.heads, begin = item * self.share;
        int64_t end = begin + self.share < all_rows ? begin + self.share : all_rows;
        for (int64_t i = begin; i < end; i++) self.merge_and_store_row(i / self.c.heads, i % self.c.heads);
    }

    float load_lse(int64_t part, int64_t row, int64_t head) const {
        return load<float>(at[c.lses] + part * c.lses_strides[0] + row * c.lses_strides[1] + head * c.lses_strides[2]);
    }

    void merge_and_store_row(int64_t row, int64_t head) const {
        float top = NEGATIVE_INFINITY;
        for (int64_t i = 0; i < c.parts; i++) {
            float x = load_lse(i, row, head);
            top = x > top || x != x ? x : top;
        }
        // If every part is empty, exp(−inf − 0) = 0 instead of exp(−inf + inf) = NaN.
        float base = top == NEGATIVE_INFINITY ? 0.0f : top, total = 0.0f;
        for (int64_t i = 0; i < c.parts; i++) total += expf(load_lse(i, row, head) - base);
        float by = top == NEGATIVE_INFINITY ? 1.0f : total;
        char* out = at[c.out.tensor] + row * c.out.strides[0] + head * c.out.strides[1];
        int64_t size = c.dtype == F32 ? 4 : 2, out_size = c.out_dtype == F32 ? 4 : 2;
        // In blocks: the output may alias a part, and is stored after all parts are loaded.
        for (int64_t begin = 0; begin < c.columns; begin += 64) {
            int64_t n = c.columns - begin < 64 ? c.columns - begin : 64;
            float sum[64] = {}, x[64];
            for (int64_t i = 0; i < c.parts; i++) {
                float part = load_lse(i, row, head);
                if (part == NEGATIVE_INFINITY) continue;  // a part without visible keys may hold anything, NaN included
                float weight = expf(part - base);
                const char* p = at[c.outs] + i * c.outs_strides[0] + row * c.outs_strides[1] + head * c.outs_strides[2];
                read_floats(p + begin * size, c.dtype, x, n);
                for (int64_t j = 0; j < n; j++) sum[j] += weight * x[j];
            }
            for (int64_t j = 0; j < n; j++) sum[j] /= by;
            write_floats(sum, c.out_dtype, out + begin * out_size, n);
        }
        if (c.lse.tensor >= 0)
            store(at[c.lse.tensor] + row * c.lse.strides[0] + head * c.lse.strides[1], base + logf(total));
    }
};

void merge(const Merge& c, Addresses at, int64_t threads) {
    constexpr int64_t WORTH_A_THREAD = 1 << 15;  // numbers
    int64_t rows = c.rows * c.heads, wanted = rows * c.parts * c.columns / WORTH_A_THREAD + 1;
    int64_t shares = wanted < threads ? wanted : threads;
    MergeRun run = {c, at, (rows + shares - 1) / shares};
    parallel_for(shares, shares, threads, MergeRun::merge_rows_of_item, &run);
}

}  // namespace
