// One source, compiled for several instruction sets; the best that the machine has is picked at run time.
//
// A file of kernels is compiled once for each level, with ZF_ISA = v2, v3, v4 (x86-64-v2: SSE4, v3: AVX2,
// v4: AVX-512; other machines have one, v2, which then means what their compiler does by itself). It defines
// its functions in zf::cpu::ZF_ISA; dispatch.cpp passes calls on. Nothing else of such a file may be visible
// outside, and nothing of the standard library may be instantiated in it: an inline function that two levels
// share is linked once, with the instructions of either. Helpers are static; those of core/ are always inlined.
#pragma once

#include "../core/ops.h"

namespace zf::cpu {
#include "../core/functions.h"
namespace v2 {
#include "../core/functions.h"
}
namespace v3 {
#include "../core/functions.h"
}
namespace v4 {
#include "../core/functions.h"
}

enum Isa : int { V2 = 2, V3 = 3, V4 = 4 };

int best_isa();             // that this machine has
int active_isa();           // the best, unless a test asked for another
bool use_isa(int wanted);  // false: this machine does not have it

// `body(context, low, high)` for ranges that together are [0, n), on torch's threads. They begin at multiples
// of `grain`: what is summed by grain does not depend on the number of threads.
using RangeBody = void (*)(void* context, int64_t low, int64_t high);
void parallel_ranges(int64_t n, int64_t grain, RangeBody body, void* context);

template <class Body>
static inline void parallel_for(int64_t n, int64_t grain, Body& body) {
  parallel_ranges(
      n, grain, [](void* c, int64_t low, int64_t high) { (*static_cast<Body*>(c))(low, high); }, &body);
}

}  // namespace zf::cpu
