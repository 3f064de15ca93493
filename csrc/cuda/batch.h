// Several tensors in one launch. What is known of them travels in the kernel's arguments: copying it to the
// device could not be captured in a graph. A block of threads takes one chunk of one tensor.
#pragma once

#include <cstddef>

#include "launch.h"

namespace zf::cuda {

// Elements [low, low + size) of an item.
struct Chunk {
  int item;
  int64_t low, size;
};

// As many items as fit, with some room for other arguments.
template <class Item>
struct Batch {
  static constexpr int MOST = (ARGUMENT_BYTES - 160) / (sizeof(Item) + sizeof(int));

  Item items[MOST];
  int ends[MOST];       // how many chunks there are up to each item's last
  int count;            // of items
  int64_t first_item;   // how many were in launches before
  int64_t first_chunk;  // the same of chunks

  __host__ __device__ int chunks() const { return count == 0 ? 0 : ends[count - 1]; }
  __host__ __device__ int start(int item) const { return item == 0 ? 0 : ends[item - 1]; }

  __device__ __forceinline__ Chunk chunk(int index) const {
    int low = 0, high = count - 1;  // the first item whose end is behind the chunk
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] > index) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t begin = int64_t(index - start(low)) * CHUNK;
    return {low, begin, lesser(CHUNK, items[low].numel - begin)};
  }
};

// `body` for one batch after the other; `describe` makes an item.
template <class Item, class Tensor, class Describe, class Body>
void for_batches(const Tensor* tensors, int64_t count, const Describe& describe, const Body& body) {
  Batch<Item> batch{};
  for (int64_t i = 0; i < count; ++i) {
    batch.items[batch.count] = describe(tensors[i]);
    batch.ends[batch.count] = batch.chunks() + int(chunks_of(tensors[i].numel));
    ++batch.count;
    if (batch.count == Batch<Item>::MOST || i + 1 == count) {
      body(batch);
      batch.first_item += batch.count;
      batch.first_chunk += batch.chunks();
      batch.count = 0;
    }
  }
}

// All that who adds up a tensor's chunks has to know of it: many more of them fit.
struct Size {
  int64_t numel;
};

template <class Tensor, class Body>
void for_sizes(const Tensor* tensors, int64_t count, const Body& body) {
  for_batches<Size>(tensors, count, [](const Tensor& tensor) { return Size{tensor.numel}; }, body);
}

template <class Tensor>
int64_t chunks_of_all(const Tensor* tensors, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += chunks_of(tensors[i].numel);
  return total;
}

}  // namespace zf::cuda
