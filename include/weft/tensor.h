// Tensor: an address with a dtype, a place and up to five sizes and strides. It owns nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace weft {

enum class DType : uint8_t { f32, f16, bf16, i32, i64, u8, u32 };

constexpr int64_t dtype_bytes(DType t) {
  switch (t) {
    case DType::f32:
    case DType::i32:
    case DType::u32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::i64: return 8;
    case DType::u8: return 1;
  }
  return 0;
}
const char* dtype_name(DType t);

enum class Place : uint8_t { host, cuda };

// A strided view, sizes and strides in elements (as DLPack counts them). A Tensor with data == nullptr and rank 0 is "absent":
// optional members of argument structs default to it. A tensor with a zero size is present and legal, data may be null then.
// Unless an op says otherwise: the last dimension is contiguous, the other strides are >= 0, `data` is aligned to the element.
struct Tensor {
  static constexpr int kMaxRank = 5;

  void* data = nullptr;
  DType dtype = DType::f32;
  Place place = Place::host;
  int8_t device = 0;  // ordinal for Place::cuda
  int8_t rank = 0;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> strides{};

  constexpr bool present() const { return rank > 0; }
  constexpr int64_t size(int dim) const { return sizes[dim < 0 ? dim + rank : dim]; }
  constexpr int64_t stride(int dim) const { return strides[dim < 0 ? dim + rank : dim]; }
  constexpr int64_t elements() const {
    int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank && i < kMaxRank; ++i) n *= sizes[i];
    return n;
  }
};

// A dense row-major view of `data`. More than five sizes, or with Place::cuda a device that no ordinal names, give a tensor that
// every op refuses.
inline Tensor dense(void* data, DType dtype, std::initializer_list<int64_t> sizes, Place place = Place::host, int device = 0) {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  t.place = place;
  t.device = static_cast<int8_t>(device >= 0 && device <= INT8_MAX ? device : -1);
  for (int64_t s : sizes) {
    if (t.rank < Tensor::kMaxRank) t.sizes[t.rank] = s;
    if (t.rank <= Tensor::kMaxRank) ++t.rank;
  }
  int64_t stride = 1;
  for (int i = (t.rank < Tensor::kMaxRank ? t.rank : Tensor::kMaxRank) - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= t.sizes[i] > 0 ? t.sizes[i] : 1;
  }
  return t;
}

// The packed tokens of a call: sequence n owns rows [cu_seqlens[n], cu_seqlens[n+1]) of every [T, ...] tensor.
// Without cu_seqlens the T rows are `count` sequences of T / count tokens each.
// cu_seqlens lives where the stream computes and is never read on the host: a sequence whose bounds are negative, decreasing,
// beyond T, or longer than max_tokens is inert (nothing is read or written for it). Sequences must not overlap: where cu_seqlens makes
// them, writes stay in bounds, but whose result a shared row keeps is not defined.
struct Sequences {
  Tensor cu_seqlens;       // [count + 1] i32 or i64, or absent: uniform
  int64_t count = 1;       // N
  int64_t max_tokens = 0;  // longest sequence, at least 1 where T > 0: bounds scratch and grids. Ignored (derived) when uniform

  static Sequences uniform(int64_t count) { return {Tensor{}, count, 0}; }
  static Sequences packed(Tensor cu_seqlens, int64_t count, int64_t max_tokens) { return {cu_seqlens, count, max_tokens}; }
};

}  // namespace weft
