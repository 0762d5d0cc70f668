// All kernels, compiled once per instruction set under the name in LEVEL. Everything but their table is local to this
// translation unit: the linker must not merge a newer instruction set's functions into an older one's.
#include "api.h"
#include "attention_run.h"
#include "append.h"
#include "merge_by_lse.h"
#include "index.h"

#define NAME_OF(level) kernels_##level
#define TABLE(level) NAME_OF(level)
#define TEXT_OF(level) #level
#define TEXT(level) TEXT_OF(level)

extern const Kernels TABLE(LEVEL);
const Kernels TABLE(LEVEL) = {TEXT(LEVEL), attention, append, merge, index_scores, index_topk};
