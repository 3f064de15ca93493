// The emulator: fibers take turns. See emulate.h.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "../core/ops.h"
#include "emulate.h"

zf::emulated::Index threadIdx, blockIdx, blockDim;

namespace zf::emulated {
namespace {

constexpr size_t STACK = 128 * 1024;
constexpr size_t SHARED = 48 * 1024;  // that a block can have
constexpr size_t EDGE = 64;           // bytes between variables in shared memory
constexpr unsigned char POISON = 0xff;
constexpr int MANY_BARRIERS = 20000;  // more than any block has

enum class State { ready, at_barrier, at_exchange, done };

struct Fiber {
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool begun;
  jmp_buf here;  // where it goes on
  State state;
  Place place;
  uint32_t mask;
  uint64_t value;
};

struct Fault {
  std::string what;
};

struct Variable {
  const void* key;
  size_t start, bytes;
};

Order order = Order::forward;
std::mt19937_64 shuffler;

// Of the block that is running.
std::vector<Fiber> fibers;  // the first `threads` of them; the others' stacks are for larger blocks
size_t threads;
std::vector<std::vector<uint64_t>> given;  // by warp: what its lanes have exchanged
std::vector<Variable> variables;
alignas(EDGE) unsigned char memory[SHARED];
jmp_buf scheduler;
const std::function<void()>* body;
std::string fault;

std::vector<int64_t> turns(int64_t count) {
  std::vector<int64_t> result(count);
  for (int64_t i = 0; i < count; ++i) result[i] = i;
  if (order == Order::reverse) std::reverse(result.begin(), result.end());
  if (order == Order::shuffled) std::shuffle(result.begin(), result.end(), shuffler);
  return result;
}

std::string text(Place place) { return std::string(place.file) + ":" + std::to_string(place.line); }

std::string text(size_t thread) {
  const Fiber& fiber = fibers[thread];
  const std::string name = "thread " + std::to_string(thread);
  if (fiber.state == State::done) return name + " has ended";
  return name + (fiber.state == State::at_barrier ? " waits at the barrier " : " is in the warp's exchange ") +
         text(fiber.place);
}

bool same(Place a, Place b) { return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0); }

void live() {
  try {
    (*body)();
  } catch (const Fault& found) {
    fault = found.what;
  }
  fibers[threadIdx.x].state = State::done;
  _longjmp(scheduler, 1);
}

void wait(State state, Place place) {
  Fiber& self = fibers[threadIdx.x];
  self.state = state;
  self.place = place;
  if (_setjmp(self.here) == 0) _longjmp(scheduler, 1);
}

// Comes back when the thread waits or has ended. Jumps are much faster than swapcontext, which begins each.
void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.here, 1);
  fiber.begun = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = STACK;
  makecontext(&context, live, 0);
  setcontext(&context);
}

void start(size_t count) {
  threads = count;
  if (fibers.size() < threads) fibers.resize(threads);
  given.assign((threads + 31) / 32, std::vector<uint64_t>(32));
  variables.clear();
  memset(memory, POISON, sizeof memory);
  for (size_t i = 0; i < threads; ++i) {
    fibers[i].state = State::ready;
    fibers[i].begun = false;
  }
}

// Completes the exchange that `thread` waits in, with all lanes of its mask.
void complete_exchange(size_t thread) {
  const uint32_t mask = fibers[thread].mask;
  const Place place = fibers[thread].place;
  const size_t first = thread / 32 * 32;
  if (!(mask >> thread % 32 & 1)) fault = text(thread) + " without being in its mask";
  for (size_t i = first; i < first + 32 && fault.empty(); ++i) {
    if (!(mask >> i % 32 & 1)) continue;
    if (i >= threads) {
      fault = text(thread) + " with a lane that the block does not have";
    } else if (fibers[i].state != State::at_exchange || !same(fibers[i].place, place) || fibers[i].mask != mask) {
      fault = text(thread) + ", but " + text(i);
    } else {
      given[first / 32][i % 32] = fibers[i].value;
    }
  }
  for (size_t i = first; i < first + 32 && fault.empty(); ++i) {
    if (mask >> i % 32 & 1) fibers[i].state = State::ready;
  }
}

// Its lanes run until each waits or has ended; then it has what they exchange. Was there a lane that could run?
bool run_warp(size_t first) {
  bool ran = false;
  for (int64_t lane : turns(int64_t(std::min(threads - first, size_t(32))))) {
    const size_t i = first + size_t(lane);
    if (fibers[i].state != State::ready || !fault.empty()) continue;
    threadIdx.x = unsigned(i);
    resume(fibers[i]);
    ran = true;
  }
  for (size_t i = first; i < std::min(first + 32, threads) && fault.empty(); ++i) {
    if (fibers[i].state == State::at_exchange) complete_exchange(i);
  }
  return ran && fault.empty();
}

// A warp goes on as long as it can, far ahead of the others; if shuffled, it is interrupted at random.
bool run_to_barrier() {
  bool ran = false, again = true;
  while (again && fault.empty()) {
    again = false;
    for (int64_t warp : turns(int64_t((threads + 31) / 32))) {
      while (run_warp(size_t(warp) * 32)) {
        again = ran = true;
        if (order == Order::shuffled && shuffler() % 4 == 0) break;
      }
    }
  }
  return ran;
}

// Everybody waits at it, or has ended.
void open_barrier() {
  for (size_t i = 1; i < threads; ++i) {
    const bool ended = fibers[0].state == State::done;
    const bool together = fibers[i].state == fibers[0].state && (ended || same(fibers[i].place, fibers[0].place));
    if (!together) fault = text(0) + ", but " + text(i);
  }
  for (size_t i = 0; i < threads; ++i) {
    if (fibers[i].state == State::at_barrier) fibers[i].state = State::ready;
  }
}

void check_edges() {
  size_t edge = 0;
  for (size_t k = 0; k <= variables.size(); ++k) {
    const size_t end = k < variables.size() ? variables[k].start : std::min(edge + EDGE, SHARED);
    for (; edge < end; ++edge) {
      if (memory[edge] != POISON) fault = "somebody wrote beside a variable in shared memory";
    }
    if (k < variables.size()) edge = end + variables[k].bytes;
  }
}

void run_block(int count) {
  start(size_t(count));
  for (int barriers = 0; fault.empty() && run_to_barrier(); ++barriers) {
    if (fault.empty()) open_barrier();
    if (barriers == MANY_BARRIERS) fault = "the block does not come to an end";
  }
  if (fault.empty()) check_edges();
}

}  // namespace

void choose_order(Order wanted, uint64_t seed) {
  order = wanted;
  shuffler.seed(seed);
}

void run(const char* kernel, Index blocks, int count, const std::function<void()>& thread) {
  body = &thread;
  blockDim.x = unsigned(count);
  fault.clear();
  for (int64_t block : turns(int64_t(blocks.x) * blocks.y * blocks.z)) {
    blockIdx = {unsigned(block % blocks.x), unsigned(block / blocks.x % blocks.y), unsigned(block / blocks.x / blocks.y)};
    run_block(count);
    if (!fault.empty()) {
      throw std::runtime_error(std::string(kernel) + ", block " + std::to_string(block) + ": " + fault);
    }
  }
}

void fail(const std::string& what) { throw Fault{"thread " + std::to_string(threadIdx.x) + ": " + what}; }

void* shared(const void* key, size_t bytes) {
  for (const Variable& variable : variables) {
    if (variable.key == key) return memory + variable.start;
  }
  const size_t free = variables.empty() ? EDGE : variables.back().start + variables.back().bytes + EDGE;
  const size_t start = (free + EDGE - 1) / EDGE * EDGE;
  if (start + bytes + EDGE > SHARED) fail("more shared memory than a block can have");
  variables.push_back({key, start, bytes});
  return memory + start;
}

void barrier(Place place) { wait(State::at_barrier, place); }

const uint64_t* exchange(uint32_t mask, uint64_t value, Place place) {
  Fiber& self = fibers[threadIdx.x];
  self.mask = mask;
  self.value = value;
  wait(State::at_exchange, place);
  return given[threadIdx.x / 32].data();
}

}  // namespace zf::emulated

// For ctypes: the operators, with a message if something went wrong ---------------------------------------

namespace zf::cuda {
#include "../core/functions.h"
}

using namespace zf;

#define ZF_VISIBLE extern "C" __attribute__((visibility("default")))

template <class Call>
static const char* message_of(const Call& call) {
  static std::string message;
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

#define ZF_ENTRY(name, parameters, ...)                  \
  ZF_VISIBLE const char* name parameters {               \
    return message_of([&] { cuda::name(__VA_ARGS__); }); \
  }

ZF_VISIBLE void choose_order(int order, uint64_t seed) { emulated::choose_order(emulated::Order(order), seed); }

ZF_ENTRY(
    adam_step, (const Slot* slots, int64_t count, const SlotTypes* types, const AdamOptions* options), slots,
    count, *types, *options, nullptr)

ZF_ENTRY(
    adam_step_stochastic,
    (const StochasticSlot* slots, int64_t count, const SlotTypes* types, const AdamOptions* options), slots, count,
    *types, *options, nullptr)

ZF_ENTRY(
    lamb_norms,
    (const Slot* slots, int64_t count, const SlotTypes* types, const LambOptions* options, double* norms,
     double* workspace),
    slots, count, *types, *options, norms, workspace, nullptr)

ZF_ENTRY(
    lamb_step,
    (const Slot* slots, int64_t count, const SlotTypes* types, const LambOptions* options, const double* norms),
    slots, count, *types, *options, norms, nullptr)

ZF_ENTRY(
    unscale_norm_check,
    (const Piece* pieces, int64_t count, int type, double factor, double* sum, int64_t* first, double* workspace),
    pieces, count, Type(type), factor, sum, first, workspace, nullptr)

ZF_ENTRY(
    sign_pack,
    (const void* values, int type, float* error, int64_t numel, const Cuts* cuts, bool l1, uint8_t* packed,
     float* scales, double* workspace),
    values, Type(type), error, numel, *cuts, l1, packed, scales, workspace, nullptr)

ZF_ENTRY(
    sign_unpack_mean,
    (const uint8_t* packed, const float* scales, int64_t chunks, const Cuts* cuts, void* out, int type,
     int64_t numel, bool add),
    packed, scales, chunks, *cuts, out, Type(type), numel, add, nullptr)

ZF_ENTRY(
    quantize_blocks,
    (const void* numbers, int type, const BlockRows* rows, uint8_t* payloads, int bits, int64_t block), numbers,
    Type(type), *rows, payloads, bits, block, nullptr)

ZF_ENTRY(
    dequantize_blocks,
    (const uint8_t* payloads, void* out, int type, const BlockRows* rows, int bits, int64_t block, bool add), payloads,
    out, Type(type), *rows, bits, block, add, nullptr)

ZF_VISIBLE int64_t unscale_workspace(const Piece* pieces, int64_t count) {
  return cuda::unscale_workspace(pieces, count);
}

ZF_VISIBLE int64_t lamb_workspace(const Slot* slots, int64_t count) { return cuda::lamb_workspace(slots, count); }

ZF_VISIBLE int64_t sign_workspace(int64_t numel, int64_t pieces) { return cuda::sign_workspace(numel, pieces); }
