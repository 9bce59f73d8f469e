// The tensor maps of TMA: the driver's encoder.
#include "cuda/common/tensor_map.h"

#include <string>

#include "core/fail.h"
#include "cuda/common/device.h"

namespace weft::cuda {

TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const auto error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();
    const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    if (is_pretended())
      function = reinterpret_cast<void*>(&is_pretended);  // plans ask whether it is there; tensor_map() calls none
    return there || is_pretended() ? reinterpret_cast<TensorMapEncoder>(function) : nullptr;
  }();
  return found;
}

CUtensorMap tensor_map(const char* op, const char* argument, const MatrixOfRows& m) {
  // The stride of a dimension with one element has no meaning, but TMA requires a legal one.
  const auto bytes = [](int64_t size, int64_t stride) { return static_cast<cuuint64_t>(size > 1 ? stride : 16); };
  const auto count = [](int64_t size) { return static_cast<cuuint64_t>(size); };
  const cuuint64_t sizes[4] = {count(m.elements), count(m.rows), count(m.heads), count(m.blocks)},
                   strides[3] = {bytes(m.rows, m.row_stride), bytes(m.heads, m.head_stride), bytes(m.blocks, m.block_stride)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(m.box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  CUtensorMap map{};
  if (is_pretended()) return map;
  for (const cuuint64_t size : sizes)
    if (size == 0) return map;  // nothing will be loaded
  const CUresult result =
      tensor_map_encoder()(&map, m.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                           const_cast<void*>(m.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error(
        fail(Code::device_error, op, argument, "has no TMA tensor map, driver error " + std::to_string(static_cast<int>(result))));
  return map;
}

}  // namespace weft::cuda
