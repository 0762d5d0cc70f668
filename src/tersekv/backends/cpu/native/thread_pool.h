// A thread pool, and buffers that a thread keeps between calls.
#pragma once

#include <stddef.h>
#include <stdint.h>

using Work = void (*)(void* context, int64_t item);

// Runs work(context, 0) … work(context, items - 1). The caller works alone if `max_useful_threads` is at most one, or if
// another call has the threads; else with all `openmp_team_threads` of a team, or with up to `max_useful_threads` of this library,
// which wait for work without spinning.
void parallel_for(int64_t items, int64_t max_useful_threads, int64_t openmp_team_threads, Work work, void* context);

// Runs a function on an OpenMP team of `threads` threads: GOMP_parallel of GNU's runtime, which LLVM's and Intel's have
// too. PyTorch's threads spin for a while after its own calls, and would compete with other threads for the cores.
using Team = void (*)(void (*function)(void*), void* context, unsigned threads, unsigned flags);

// Sets the team that `parallel_for` uses; null: its own threads. A forked child keeps its own: it has no team.
void use_team(Team openmp_parallel);
bool has_team();

// Returns a buffer of the calling thread, aligned to 64 bytes, valid until its next call for the same `use`; or null.
enum Use { FOR_REQUESTS, FOR_CALL, FOR_ITEM, USES };
char* cached_buffer(Use use, size_t bytes);
