// The functions that Python calls. The best kernels that this machine runs are selected at load.
#include "api.h"
#include "thread_pool.h"

#include <string.h>

extern const Kernels kernels_plain, kernels_avx2, kernels_avx512, kernels_avx512_bf16;

namespace {

// Lists the levels that this machine runs, the best last.
int list_supported_levels(const Kernels** kernels_out) {
    int n = 0;
    kernels_out[n++] = &kernels_plain;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool wide = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    (void)avx2, (void)wide;
#if defined(HAS_AVX2)
    if (avx2) kernels_out[n++] = &kernels_avx2;
#endif
#if defined(HAS_AVX512)
    if (wide) kernels_out[n++] = &kernels_avx512;
#endif
#if defined(HAS_AVX512_BF16)
    if (wide && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16"))
        kernels_out[n++] = &kernels_avx512_bf16;
#endif
#endif
    return n;
}

const Kernels* chosen() {
    const Kernels* known[4];
    return known[list_supported_levels(known) - 1];
}

const Kernels* kernels = chosen();

}  // namespace

#define PUBLIC __attribute__((visibility("default")))

extern "C" {

// Lists the names of the levels that this machine runs, the best last.
PUBLIC int tersekv_levels(const char** names) {
    const Kernels* known[4];
    int n = list_supported_levels(known);
    for (int i = 0; i < n; i++) names[i] = known[i]->name;
    return n;
}

PUBLIC const char* tersekv_level() { return kernels->name; }

// Returns the hash of the sources that this was compiled from.
PUBLIC const char* tersekv_sources() { return TERSEKV_SOURCES; }

// Selects a level, for tests. Returns 0 if this machine has none of that name.
PUBLIC int tersekv_use_level(const char* name) {
    const Kernels* known[4];
    for (int i = list_supported_levels(known); i-- > 0;)
        if (strcmp(known[i]->name, name) == 0) return kernels = known[i], 1;
    return 0;
}

// Threads in use: those of OpenMP's GOMP_parallel, or null for the library's own.
PUBLIC int64_t tersekv_has_team() { return has_team(); }
PUBLIC void tersekv_use_team(void* parallel) { use_team(reinterpret_cast<Team>(parallel)); }

// Sizes of the records, for Python to compare with its own.
PUBLIC void tersekv_sizes(int64_t* sizes) {
    sizes[0] = sizeof(Attention), sizes[1] = sizeof(Append), sizes[2] = sizeof(Merge);
    sizes[3] = sizeof(IndexScores), sizes[4] = sizeof(IndexTopk);
}

PUBLIC int64_t tersekv_attention(const Attention* call, Addresses at, int64_t threads, Report* report) {
    kernels->attention(*call, at, threads, *report);
    return report->fault;
}

PUBLIC int64_t tersekv_append(const Append* call, Addresses at, int64_t threads) {
    kernels->append(*call, at, threads);
    return 0;
}

PUBLIC int64_t tersekv_merge(const Merge* call, Addresses at, int64_t threads) {
    kernels->merge(*call, at, threads);
    return 0;
}

PUBLIC int64_t tersekv_index_scores(const IndexScores* call, Addresses at, int64_t threads, Report* report) {
    kernels->index_scores(*call, at, threads, *report);
    return report->fault;
}

PUBLIC int64_t tersekv_index_topk(const IndexTopk* call, Addresses at, int64_t threads) {
    kernels->index_topk(*call, at, threads);
    return 0;
}
}
