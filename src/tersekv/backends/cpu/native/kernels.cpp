// All kernels, compiled once for each instruction set under the name in LEVEL. Everything but their table is local to
// this unit: what a newer instruction set may use must not be picked by the linker for an older one.
#include "api.h"
#include "attention_run.h"
#include "append.h"
#include "merge.h"

#define NAME_OF(level) kernels_##level
#define TABLE(level) NAME_OF(level)
#define TEXT_OF(level) #level
#define TEXT(level) TEXT_OF(level)

extern const Kernels TABLE(LEVEL);
const Kernels TABLE(LEVEL) = {TEXT(LEVEL), attention, append, merge};
