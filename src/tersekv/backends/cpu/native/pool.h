// Threads to share work among, and memory that a thread keeps from call to call.
#pragma once

#include <stddef.h>
#include <stdint.h>

using Work = void (*)(void* context, int64_t item);

// Runs work(context, 0) … work(context, items - 1). The caller does it alone if no more than one thread is worth it, or if
// another call has the threads; else there help a team, all `threads` of it, or up to `worth` threads of this library,
// which wait for work without spinning.
void parallel(int64_t items, int64_t worth, int64_t threads, Work work, void* context);

// How OpenMP runs a function on a team of so many threads: GOMP_parallel of GNU's runtime, which LLVM's and Intel's have
// too. PyTorch's threads spin for a while after its own calls: others beside them would share their cores with them.
using Team = void (*)(void (*function)(void*), void* context, unsigned threads, unsigned flags);

// Whose threads `parallel` takes from now on; null: its own. A forked child keeps its own: the team stayed behind.
void use_team(Team team);
bool has_team();

// Memory of the calling thread, aligned to 64 bytes, valid until the thread asks for the same `use` again; null: none.
enum Use { FOR_REQUESTS, FOR_CALL, FOR_ITEM, USES };
char* kept(Use use, size_t bytes);
