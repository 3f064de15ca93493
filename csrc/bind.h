// The operators as torch sees them: checks what it is given and hands raw pointers to the kernels. Included by
// bind_cpu.cpp and bind_cuda.cpp, which say before what differs: the namespace of the kernels (ZF_SIDE), and in
// it a `Queue(device)`, which converts to the stream to use and makes the device the current one while it lives.
//
// All is on torch's stable ABI. The schemas are in zero_full/kernels/ops.py.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "core/ops.h"

namespace zf::ZF_SIDE {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

inline Type type_of(const Tensor& t, const char* op, const char* what) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Type::f32;
    case ScalarType::BFloat16:
      return Type::bf16;
    case ScalarType::Half:
      return Type::f16;
    default:
      STD_TORCH_CHECK(false, "zero_full::", op, ": ", what, " must be float32, bfloat16 or float16");
  }
  return Type::none;
}

inline void check_memory(const Tensor& t, const Tensor& like, const char* op, const char* what) {
  STD_TORCH_CHECK(t.is_contiguous(), "zero_full::", op, ": ", what, " must be contiguous");
  STD_TORCH_CHECK(t.device() == like.device(), "zero_full::", op, ": ", what, " must be on the device of the rest");
}

inline void check_type(const Tensor& t, ScalarType type, const char* op, const char* what, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == type, "zero_full::", op, ": ", what, " must be ", name);
}

inline Tensor room(const Tensor& like, std::vector<int64_t> size, ScalarType type) {
  return torch::stable::new_empty(like, size, type);
}

inline Tensor workspace(const Tensor& like, int64_t doubles) { return room(like, {doubles}, ScalarType::Double); }

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

inline Queue queue_of(const Tensor& t) { return Queue(t.get_device_index()); }

// One of the lists of an optimizer's operator: as long as `masters`, of one type, with the same sizes.
inline Type check_list(const Tensors& list, const Tensors& masters, const char* op, const char* what) {
  STD_TORCH_CHECK(
      list.size() == masters.size(), "zero_full::", op, ": ", masters.size(), " masters, but ", list.size(), " ", what);
  Type type = Type::none;
  for (size_t i = 0; i < list.size(); ++i) {
    check_memory(list[i], masters[0], op, what);
    STD_TORCH_CHECK(
        list[i].numel() == masters[i].numel(), "zero_full::", op, ": ", what, " ", i, " has ", list[i].numel(),
        " elements, its master ", masters[i].numel());
    const Type here = type_of(list[i], op, what);
    STD_TORCH_CHECK(i == 0 || here == type, "zero_full::", op, ": ", what, " must all be of one type");
    type = here;
  }
  return type;
}

inline void check_steps(const Tensors& steps, const Tensors& masters, const char* op) {
  STD_TORCH_CHECK(
      steps.size() == masters.size(), "zero_full::", op, ": ", masters.size(), " masters, but ", steps.size(), " steps");
  for (const Tensor& step : steps) {
    check_memory(step, masters[0], op, "steps");
    check_type(step, ScalarType::Float, op, "steps", "float32");
    STD_TORCH_CHECK(step.numel() == 1, "zero_full::", op, ": a step is one number");
  }
}

struct Work {
  std::vector<Slot> slots;
  SlotTypes types;
};

// Empty lists stand for what an operator does not have.
inline Work collect(
    const char* op, const Tensors& masters, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
    const Tensors& steps, const Tensors& copies) {
  const Type none = Type::none;
  Work work;
  work.types.master = check_list(masters, masters, op, "masters");
  work.types.grad = grads.empty() ? none : check_list(grads, masters, op, "grads");
  work.types.moments = check_list(exp_avgs, masters, op, "exp_avgs");
  work.types.copy = copies.empty() ? none : check_list(copies, masters, op, "copies");
  STD_TORCH_CHECK(
      check_list(exp_avg_sqs, masters, op, "exp_avg_sqs") == work.types.moments, "zero_full::", op,
      ": both moments must be of one type");
  STD_TORCH_CHECK(work.types.master != Type::f16, "zero_full::", op, ": masters must be float32 or bfloat16");
  STD_TORCH_CHECK(work.types.moments != Type::f16, "zero_full::", op, ": moments must be float32 or bfloat16");
  STD_TORCH_CHECK(work.types.copy != Type::f32, "zero_full::", op, ": copies must be bfloat16 or float16");
  if (!steps.empty()) check_steps(steps, masters, op);
  for (size_t i = 0; i < masters.size(); ++i) {
    work.slots.push_back(
        {masters[i].data_ptr(), grads.empty() ? nullptr : grads[i].data_ptr(), exp_avgs[i].data_ptr(),
         exp_avg_sqs[i].data_ptr(), copies.empty() ? nullptr : copies[i].data_ptr(),
         steps.empty() ? nullptr : data<const float>(steps[i]), masters[i].numel()});
  }
  return work;
}

inline std::vector<MarkedSlot> marked(const char* op, const Work& work, const Tensors& changed, const Tensors& masters) {
  STD_TORCH_CHECK(Queue::memory_is_here, "zero_full::", op, ": changed elements are marked on the CPU only");
  STD_TORCH_CHECK(work.types.copy != Type::none, "zero_full::", op, ": changed elements are those of copies");
  STD_TORCH_CHECK(
      changed.size() == masters.size(), "zero_full::", op, ": ", masters.size(), " masters, but ", changed.size(),
      " changed");
  std::vector<MarkedSlot> slots;
  for (size_t i = 0; i < masters.size(); ++i) {
    const int64_t bytes = (work.slots[i].numel + 7) / 8;
    check_memory(changed[i], masters[0], op, "changed");
    check_type(changed[i], ScalarType::Byte, op, "changed", "uint8");
    STD_TORCH_CHECK(
        changed[i].numel() == bytes, "zero_full::", op, ": changed ", i, " has ", changed[i].numel(),
        " bytes, its master's bits take ", bytes);
    slots.push_back({work.slots[i], data<uint8_t>(changed[i]), 8 * bytes});
  }
  return slots;
}

inline void adam_step_op(
    Tensors masters, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors steps, Tensors copies, double lr,
    double beta1, double beta2, double eps, double weight_decay, bool decoupled, double factor, bool bias_correction,
    std::optional<Tensors> changed) {
  if (masters.empty()) return;
  check_list(grads, masters, "adam_step", "grads");
  check_steps(steps, masters, "adam_step");
  const Work work = collect("adam_step", masters, grads, exp_avgs, exp_avg_sqs, steps, copies);
  const AdamOptions options{lr, beta1, beta2, eps, weight_decay, factor, decoupled, bias_correction};
  if (changed) {
    const std::vector<MarkedSlot> slots = marked("adam_step", work, *changed, masters);
    adam_step_marking(slots.data(), slots.size(), work.types, options, queue_of(masters[0]));
  } else {
    adam_step(work.slots.data(), work.slots.size(), work.types, options, queue_of(masters[0]));
  }
}

inline void adam_step_stochastic_op(
    Tensors masters, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors steps, std::vector<int64_t> keys,
    std::vector<int64_t> places, double lr, double beta1, double beta2, double eps, double weight_decay,
    bool decoupled, double factor, bool bias_correction) {
  if (masters.empty()) return;
  const char* op = "adam_step_stochastic";
  check_list(grads, masters, op, "grads");
  check_steps(steps, masters, op);
  const Work work = collect(op, masters, grads, exp_avgs, exp_avg_sqs, steps, {});
  STD_TORCH_CHECK(work.types.master == Type::bf16, "zero_full::", op, ": masters must be bfloat16");
  std::vector<StochasticSlot> slots;
  for (size_t i = 0; i < masters.size(); ++i) {
    STD_TORCH_CHECK(
        keys.size() == masters.size() && places.size() == masters.size(), "zero_full::", op, ": ", masters.size(),
        " masters, but ", keys.size(), " keys and ", places.size(), " places");
    STD_TORCH_CHECK(places[i] >= 0, "zero_full::", op, ": place ", i, " is negative");
    slots.push_back({work.slots[i], uint64_t(keys[i]), uint64_t(places[i])});
  }
  const AdamOptions options{lr, beta1, beta2, eps, weight_decay, factor, decoupled, bias_correction};
  adam_step_stochastic(slots.data(), slots.size(), work.types, options, queue_of(masters[0]));
}

inline Tensor lamb_norms_op(
    Tensors masters, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, double beta1, double beta2, double eps,
    double weight_decay, bool eps_inside_sqrt, double factor) {
  STD_TORCH_CHECK(!masters.empty(), "zero_full::lamb_norms: there are no masters");
  check_list(grads, masters, "lamb_norms", "grads");
  const Work work = collect("lamb_norms", masters, grads, exp_avgs, exp_avg_sqs, {}, {});
  const int64_t count = work.slots.size();
  Tensor norms = room(masters[0], {count, 2}, ScalarType::Double);
  Tensor space = workspace(masters[0], lamb_workspace(work.slots.data(), count));
  const LambOptions options{0, beta1, beta2, eps, weight_decay, factor, 0, 0, false, eps_inside_sqrt};
  lamb_norms(
      work.slots.data(), count, work.types, options, data<double>(norms), data<double>(space), queue_of(masters[0]));
  return norms;
}

inline void lamb_step_op(
    Tensors masters, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors steps, Tensors copies, Tensor norms, double lr,
    double beta1, double beta2, double eps, double weight_decay, bool bias_correction, bool eps_inside_sqrt,
    double min_trust, double max_trust) {
  if (masters.empty()) return;
  check_steps(steps, masters, "lamb_step");
  const Work work = collect("lamb_step", masters, {}, exp_avgs, exp_avg_sqs, steps, copies);
  const int64_t count = work.slots.size();
  check_memory(norms, masters[0], "lamb_step", "norms");
  check_type(norms, ScalarType::Double, "lamb_step", "norms", "float64");
  STD_TORCH_CHECK(norms.numel() == 2 * count, "zero_full::lamb_step: norms must have two numbers for each master");
  const LambOptions options{lr, beta1,     beta2,     eps,       weight_decay,
                            1,  min_trust, max_trust, bias_correction, eps_inside_sqrt};
  lamb_step(work.slots.data(), count, work.types, options, data<const double>(norms), queue_of(masters[0]));
}

inline std::tuple<Tensor, Tensor> unscale_norm_check_op(Tensors gradients, double factor) {
  STD_TORCH_CHECK(!gradients.empty(), "zero_full::unscale_norm_check: there are no gradients");
  const char* op = "unscale_norm_check";
  std::vector<Piece> pieces;
  const Type type = type_of(gradients[0], op, "gradients");
  for (const Tensor& g : gradients) {
    check_memory(g, gradients[0], op, "gradients");
    STD_TORCH_CHECK(type_of(g, op, "gradients") == type, "zero_full::", op, ": gradients must all be of one type");
    pieces.push_back({g.data_ptr(), g.numel()});
  }
  const int64_t count = pieces.size();
  Tensor sum = room(gradients[0], {}, ScalarType::Double), first = room(gradients[0], {}, ScalarType::Long);
  Tensor space = workspace(gradients[0], unscale_workspace(pieces.data(), count));
  unscale_norm_check(
      pieces.data(), count, type, factor, data<double>(sum), data<int64_t>(first), data<double>(space),
      queue_of(gradients[0]));
  return {sum, first};
}

inline void check_ends(const int64_t* ends, int64_t count, int64_t numel, const char* op) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t before = i ? ends[i - 1] : 0;
    STD_TORCH_CHECK(
        before <= ends[i] && ends[i] <= numel, "zero_full::", op, ": ends must ascend from 0 to ", numel,
        " at most, but end ", i, " is ", ends[i], " after ", before);
  }
}

// On a GPU the ends cannot be looked at without waiting for it: there they are the caller's responsibility, unless
// ZERO_FULL_CHECK_ENDS=1 wants them to be looked at.
inline Cuts cuts_of(const Tensor& ends, const Tensor& flat, const char* op) {
  check_memory(ends, flat, op, "ends");
  check_type(ends, ScalarType::Long, op, "ends", "int64");
  const char* wanted = std::getenv("ZERO_FULL_CHECK_ENDS");
  if (Queue::memory_is_here) {
    check_ends(data<const int64_t>(ends), ends.numel(), flat.numel(), op);
  } else if (wanted && std::strcmp(wanted, "1") == 0) {
    using torch::headeronly::DeviceType;
    const Tensor here = torch::stable::to(ends, torch::stable::Device(DeviceType::CPU));
    check_ends(data<const int64_t>(here), ends.numel(), flat.numel(), op);
  }
  return {data<const int64_t>(ends), ends.numel()};
}

inline std::tuple<Tensor, Tensor> sign_pack_op(std::optional<Tensor> values, Tensor error, Tensor ends, bool l1) {
  const char* op = "sign_pack";
  check_memory(error, error, op, "error");
  check_type(error, ScalarType::Float, op, "error", "float32");
  const int64_t numel = error.numel();
  Type type = Type::none;
  if (values) {
    check_memory(*values, error, op, "values");
    STD_TORCH_CHECK(
        values->numel() == numel, "zero_full::", op, ": ", values->numel(), " values, but ", numel, " errors");
    type = type_of(*values, op, "values");
  }
  const Cuts cuts = cuts_of(ends, error, op);
  Tensor packed = room(error, {(numel + 7) / 8}, ScalarType::Byte), scales = room(error, {cuts.count}, ScalarType::Float);
  Tensor space = workspace(error, sign_workspace(numel, cuts.count));
  sign_pack(
      values ? values->data_ptr() : nullptr, type, data<float>(error), numel, cuts, l1, data<uint8_t>(packed),
      data<float>(scales), data<double>(space), queue_of(error));
  return {packed, scales};
}

inline void sign_unpack_mean_op(Tensor packed, Tensor scales, Tensor ends, Tensor out, bool add) {
  const char* op = "sign_unpack_mean";
  for (const Tensor* t : {&packed, &scales, &out}) check_memory(*t, out, op, "packed, scales and out");
  check_type(packed, ScalarType::Byte, op, "packed", "uint8");
  check_type(scales, ScalarType::Float, op, "scales", "float32");
  const Cuts cuts = cuts_of(ends, out, op);
  const int64_t bytes = (out.numel() + 7) / 8;
  const bool fits = packed.dim() == 2 && scales.dim() == 2 && packed.size(0) == scales.size(0) &&
                    packed.size(0) > 0 && packed.size(1) == bytes && scales.size(1) == cuts.count;
  STD_TORCH_CHECK(
      fits, "zero_full::", op, ": packed must have a row or more of ", bytes, " bytes, and scales as many of ",
      cuts.count, " numbers");
  sign_unpack_mean(
      data<const uint8_t>(packed), data<const float>(scales), packed.size(0), cuts, out.data_ptr(),
      type_of(out, op, "out"), out.numel(), add, queue_of(out));
}

// The last dimension is a row, those before, two at most, count rows. A payload may have one more before all:
// its terms.
inline BlockRows rows_of(const Tensor& payload, const Tensor& numbers, bool may_have_terms, const char* op) {
  const int64_t dim = numbers.dim(), terms = payload.dim() - dim;
  STD_TORCH_CHECK(
      1 <= dim && dim <= 3 && (terms == 0 || (terms == 1 && may_have_terms)), "zero_full::", op, ": numbers of ", dim,
      " dimensions, but payloads of ", payload.dim());
  BlockRows rows{{1, 1}, numbers.size(dim - 1), {0, 0}, {0, 0}, 1, 0};
  for (int64_t k = 0; k + 1 < dim; ++k) {
    const int64_t place = k + 3 - dim;
    rows.counts[place] = numbers.size(k);
    rows.numbers[place] = numbers.stride(k);
    rows.payloads[place] = payload.stride(k + terms);
    STD_TORCH_CHECK(
        numbers.size(k) == payload.size(k + terms), "zero_full::", op, ": ", numbers.size(k), " rows of numbers, but ",
        payload.size(k + terms), " payloads");
  }
  if (terms == 1) {
    rows.terms = payload.size(0);
    rows.apart = payload.stride(0);
    STD_TORCH_CHECK(rows.terms > 0, "zero_full::", op, ": there are no payloads to add up");
  }
  return rows;
}

// Rows that are written must not share memory.
inline void check_apart(const BlockRows& rows, const int64_t (&apart)[2], int64_t size, const char* op) {
  const int near = rows.counts[1] == 1 || (rows.counts[0] > 1 && apart[0] < apart[1]) ? 0 : 1;
  const bool fine = (rows.counts[near] <= 1 || apart[near] >= size) &&
                    (rows.counts[1 - near] <= 1 || apart[1 - near] >= (rows.counts[near] - 1) * apart[near] + size);
  STD_TORCH_CHECK(fine || size == 0, "zero_full::", op, ": rows that are written share memory");
}

inline BlockRows check_payload(
    const Tensor& payload, const Tensor& numbers, int64_t bits, int64_t block, bool may_have_terms, const char* op) {
  check_type(payload, ScalarType::Byte, op, "payload", "uint8");
  STD_TORCH_CHECK(
      (bits == 4 || bits == 8) && block >= 1, "zero_full::", op, ": ", bits, " bits in blocks of ", block,
      ": bits are 4 or 8, and a block has a number or more");
  const BlockRows rows = rows_of(payload, numbers, may_have_terms, op);
  for (const Tensor* t : {&payload, &numbers}) {
    STD_TORCH_CHECK(t->device() == numbers.device(), "zero_full::", op, ": payload must be on the device of the numbers");
    const int64_t last = t->dim() - 1;
    STD_TORCH_CHECK(
        t->size(last) <= 1 || t->stride(last) == 1, "zero_full::", op, ": rows of payload and numbers must be contiguous");
  }
  const int64_t numel = rows.numel, bytes = (numel * bits + 7) / 8 + (numel / block + (numel % block != 0)) * 4;
  const int64_t given = payload.size(payload.dim() - 1);
  STD_TORCH_CHECK(
      given == bytes, "zero_full::", op, ": ", numel, " numbers become ", bytes, " bytes, but payload has ", given);
  check_apart(rows, may_have_terms ? rows.numbers : rows.payloads, may_have_terms ? numel : bytes, op);
  return rows;
}

inline void quantize_blocks_op(Tensor numbers, Tensor payload, int64_t bits, int64_t block) {
  const char* op = "quantize_blocks";
  const BlockRows rows = check_payload(payload, numbers, bits, block, false, op);
  const Type type = type_of(numbers, op, "numbers");
  if (numbers.numel() == 0) return;
  quantize_blocks(numbers.data_ptr(), type, rows, data<uint8_t>(payload), int(bits), block, queue_of(numbers));
}

inline void dequantize_blocks_op(Tensor payload, Tensor out, int64_t bits, int64_t block, bool add) {
  const char* op = "dequantize_blocks";
  const BlockRows rows = check_payload(payload, out, bits, block, true, op);
  const Type type = type_of(out, op, "out");
  STD_TORCH_CHECK(
      payload.dim() == out.dim() || type == Type::f32, "zero_full::", op, ": payloads are added up in float32 only");
  if (out.numel() == 0) return;
  dequantize_blocks(data<const uint8_t>(payload), out.data_ptr(), type, rows, int(bits), block, add, queue_of(out));
}

#define ZF_IMPLEMENTATIONS(m)                                \
  m.impl("adam_step", TORCH_BOX(&adam_step_op));             \
  m.impl("adam_step_stochastic", TORCH_BOX(&adam_step_stochastic_op)); \
  m.impl("lamb_norms", TORCH_BOX(&lamb_norms_op));           \
  m.impl("lamb_step", TORCH_BOX(&lamb_step_op));             \
  m.impl("unscale_norm_check", TORCH_BOX(&unscale_norm_check_op)); \
  m.impl("sign_pack", TORCH_BOX(&sign_pack_op));             \
  m.impl("sign_unpack_mean", TORCH_BOX(&sign_unpack_mean_op)); \
  m.impl("quantize_blocks", TORCH_BOX(&quantize_blocks_op)); \
  m.impl("dequantize_blocks", TORCH_BOX(&dequantize_blocks_op));

}  // namespace zf::ZF_SIDE
