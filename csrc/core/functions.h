// The operators. Included by whoever has them, inside its namespace: zf::cuda, zf::cpu, and there once more for
// each instruction set. So there is no include guard.
//
// On CUDA everything pointed to is device memory, except the arrays of `Slot` and `Piece`, and the work is queued
// on the stream; on the CPU it is done when the function returns, and `Stream` means nothing.

// One sweep: gradients in; masters, moments and low-precision copies of the masters out. What somebody has written to
// a copy goes into its master first.
void adam_step(const Slot*, int64_t count, SlotTypes, const AdamOptions&, Stream);

// The same. It also sets the bits of the copies' elements that it changes, or that somebody has written: bit i % 8 of
// byte i / 8. Other bits stay. On the CPU only.
void adam_step_marking(const MarkedSlot*, int64_t count, SlotTypes, const AdamOptions&, Stream);

// adam_step on bf16 masters without copies. What is kept in bf16 is rounded stochastically: see rounding.h.
void adam_step_stochastic(const StochasticSlot*, int64_t count, SlotTypes, const AdamOptions&, Stream);

// `sum`: of the squares of all elements times `factor`. `first`: where the first is that is not finite, counted
// through all pieces, or -1. Unless factor is 1 elements are multiplied in place.
void unscale_norm_check(
    const Piece*, int64_t count, Type, double factor, double* sum, int64_t* first, double* workspace, Stream);

// New moments, and in norms[2 i], norms[2 i + 1] the sums of squares of slot i's master and of its update.
void lamb_norms(const Slot*, int64_t count, SlotTypes, const LambOptions&, double* norms, double* workspace, Stream);

// New masters and copies. The update is computed from the moments once more, as cheap as having stored it.
void lamb_step(const Slot*, int64_t count, SlotTypes, const LambOptions&, const double* norms, Stream);

// wanted = values + error, or the error alone if `values` is null. Bit i % 8 of byte i / 8 says wanted[i] >= 0
// (the last byte's surplus bits are 0). A piece's scale is its root mean square, or its mean size if `l1`.
// error = wanted - scale * sign; in the padding, whose scale is 0, error = wanted.
void sign_pack(
    const void* values, Type, float* error, int64_t numel, Cuts, bool l1, uint8_t* packed, float* scales,
    double* workspace, Stream);

// out = the mean over `chunks` of scale * sign, or that is added to `out`. Rows of `packed` have
// (numel + 7) / 8 bytes, rows of `scales` one number a piece. The padding gets 0, or stays.
void sign_unpack_mean(
    const uint8_t* packed, const float* scales, int64_t chunks, Cuts, void* out, Type, int64_t numel, bool add,
    Stream);

// See reference.py for the payload's format: integers, then the blocks' scales, at any byte. The payloads of a row
// of `out`, which is fp32 if there are several, are added up, the first one first, to `out` if `add`.
void quantize_blocks(const void* numbers, Type, const BlockRows&, uint8_t* payloads, int bits, int64_t block, Stream);
void dequantize_blocks(
    const uint8_t* payloads, void* out, Type, const BlockRows&, int bits, int64_t block, bool add, Stream);

// out = the sum of the terms, first to last, over `divisor`: in fp32, rounded once. `out` may be one of the terms.
// On the CPU only.
void sum_and_divide(const Terms&, void* out, Type, int64_t numel, double divisor);

// A copy that does not fetch the lines of `out` into this core's caches. On the CPU only.
void nontemporal_copy(const void* source, void* out, int64_t bytes);

// How many doubles of workspace the functions above want.
int64_t unscale_workspace(const Piece*, int64_t count);
int64_t lamb_workspace(const Slot*, int64_t count);
int64_t sign_workspace(int64_t numel, int64_t pieces);
