/// Tensor: an address with a dtype, a place and up to five sizes and strides. It owns nothing.
/// @file
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

/// The type of an element.
enum class DType : uint8_t {
  f32,   ///< IEEE single precision
  f16,   ///< IEEE half precision
  bf16,  ///< bfloat16: the upper 16 bits of an f32
  i32,   ///< signed, 32 bits
  i64,   ///< signed, 64 bits
  u8,    ///< unsigned, 8 bits
  u32,   ///< unsigned, 32 bits
};

/// The bytes of an element; 0 for a value that is no dtype.
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
/// The name of a dtype: "bf16".
const char* dtype_name(DType t);

/// Whose memory a tensor is in.
enum class Place : uint8_t {
  host,    ///< memory of the process
  cuda,    ///< memory of a CUDA device
  vulkan,  ///< memory of a Vulkan device: `data` is a buffer device address
};

/// A strided view. Sizes and strides count elements, as in DLPack. A tensor of rank 0 is absent: optional members of argument
/// structs default to it. A tensor with a size of 0 is present and legal, and its data may be null.
///
/// Unless an op says otherwise, the last dimension is contiguous, the other strides are >= 0, and `data` is aligned to the element.
struct Tensor {
  static constexpr int kMaxRank = 5;  ///< the most dimensions

  void* data = nullptr;                     ///< the address of element [0, 0, ...]
  DType dtype = DType::f32;                 ///< the type of an element
  Place place = Place::host;                ///< whose memory `data` is in
  int8_t device = 0;                        ///< other places than host: the ordinal of the device
  int8_t rank = 0;                          ///< the number of dimensions; 0: absent
  bool read_only = false;                   ///< made from a pointer to const: every op refuses it as an output
  std::array<int64_t, kMaxRank> sizes{};    ///< elements along each dimension
  std::array<int64_t, kMaxRank> strides{};  ///< elements from one index of a dimension to the next

  /// Was the tensor given at all?
  constexpr bool present() const { return rank > 0; }
  /// The size of a dimension; negative ones count from the last.
  constexpr int64_t size(int dim) const { return sizes[dim < 0 ? dim + rank : dim]; }
  /// The stride of a dimension; negative ones count from the last.
  constexpr int64_t stride(int dim) const { return strides[dim < 0 ? dim + rank : dim]; }
  /// The number of elements; 0 when absent.
  constexpr int64_t elements() const {
    int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank && i < kMaxRank; ++i) n *= sizes[i];
    return n;
  }
};

namespace detail {
inline Tensor dense(void* data, bool read_only, DType dtype, std::initializer_list<int64_t> sizes, Place place, int device) {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  t.place = place;
  t.device = static_cast<int8_t>(device >= 0 && device <= INT8_MAX ? device : -1);
  t.read_only = read_only;
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
}  // namespace detail

/// A dense row-major view of `data`. More than five sizes, or a device that no ordinal names, give a tensor that
/// every op refuses.
inline Tensor dense(void* data, DType dtype, std::initializer_list<int64_t> sizes, Place place = Place::host, int device = 0) {
  return detail::dense(data, false, dtype, sizes, place, device);
}
/// The same of memory that is only read: an input. An op that would write to the tensor refuses it.
template <class P>
requires(std::is_pointer_v<P>&& std::is_const_v<std::remove_pointer_t<P>>) Tensor
    dense(P data, DType dtype, std::initializer_list<int64_t> sizes, Place place = Place::host, int device = 0) {
  return detail::dense(const_cast<void*>(static_cast<const void*>(data)), true, dtype, sizes, place, device);
}

/// How the T packed tokens of a call belong to sequences. Sequence n owns rows [cu_seqlens[n], cu_seqlens[n+1]) of every [T, ...]
/// tensor. Without cu_seqlens, the T rows are `count` sequences of T / count tokens each.
///
/// cu_seqlens lives where the stream computes and is never read on the host. A sequence is inert (nothing is read or written for
/// it) where its bounds are negative, decreasing, beyond T, or further apart than max_tokens. Sequences must not overlap: where
/// cu_seqlens makes them overlap, writes stay in bounds, but it is not defined whose result a shared row keeps.
struct Sequences {
  Tensor cu_seqlens;  ///< [count + 1] i32 or i64, or absent: sequences of equal length
  int64_t count = 1;  ///< N, the number of sequences
  /// The longest sequence, at least 1 where T > 0: bounds scratch and grids. Without cu_seqlens it is ignored: T / count takes its
  /// place.
  int64_t max_tokens = 0;

  /// `count` sequences of equal length.
  static Sequences uniform(int64_t count) { return {Tensor{}, count, 0}; }
  /// Sequences whose bounds a tensor holds.
  static Sequences packed(Tensor cu_seqlens, int64_t count, int64_t max_tokens) { return {cu_seqlens, count, max_tokens}; }
};

}  // namespace weft
#pragma GCC visibility pop
