// Threads that wait for work without spinning, and memory that a thread keeps from call to call.
#pragma once

#include <stddef.h>
#include <stdint.h>

using Work = void (*)(void* context, int64_t item);

// Runs work(context, 0) … work(context, items - 1) on up to `threads` threads, the caller among them.
void parallel(int64_t items, int64_t threads, Work work, void* context);

// Memory of the calling thread, aligned to 64 bytes, valid until the thread asks for the same `use` again; null: none.
enum Use { FOR_REQUESTS, FOR_CALL, FOR_ITEM, USES };
char* kept(Use use, size_t bytes);
