// RowsView: rows of a tensor [token][head][...] as the cpu kernels read them.
#pragma once

#include <cstdint>

#include "weft/tensor.h"

namespace weft::cpu {

struct RowsView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t token = 0, head = 0;  // strides, in elements

  int64_t at(int64_t t, int64_t h) const { return t * token + h * head; }
};

inline RowsView rows_view(const Tensor& t) {
  if (!t.present()) return {};
  return {t.data, t.dtype, t.strides[0], t.strides[1]};
}

}  // namespace weft::cpu
