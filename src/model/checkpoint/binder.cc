// Takes tensors of a checkpoint by name: see binder.h.
#include "model/checkpoint/binder.h"

#include "files/refuse.h"

namespace weft::model {
namespace {

std::string text(const Binder::Sizes& sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(sizes[i]);
  return out + "]";
}

}  // namespace

void Binder::refuse(const std::string& name, const std::string& what) { files::refuse("checkpoint", name, what); }

const TensorView& Binder::take(const std::string& name, const Sizes& wanted, bool blocks) {
  const TensorView* view = checkpoint_.find(name);
  if (!view) refuse(name, "is missing, wanted " + text(wanted));
  if (view->sizes != wanted) refuse(name, "is " + text(view->sizes) + ", wanted " + text(wanted));
  if (!view->type || (!blocks && !is_float(*view->type)))
    refuse(name, "is " + std::string(view->dtype_text) + ", wanted F32, F16 or BF16" +
                     (blocks && checkpoint_.has_blocks() ? ", or blocks Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K" : ""));
  used_.insert(name);
  checkpoint_.align(name, most_copied_);
  return *view;
}

Matrix Binder::matrix(const std::string& name, int64_t rows, int64_t cols) {
  const TensorView& view = take(name, {rows, cols}, true);
  return {view.data, *view.type, rows, cols};
}

Matrix Binder::matrices(const std::string& name, int64_t count, int64_t rows, int64_t cols) {
  const TensorView& view = take(name, {count, rows, cols}, true);
  return {view.data, *view.type, count * rows, cols};
}

Matrix Binder::row(const std::string& name, int64_t cols) {
  const TensorView* found = checkpoint_.find(name);
  const TensorView& view = take(name, found && found->sizes.size() == 2 ? Sizes{1, cols} : Sizes{cols}, true);
  return {view.data, *view.type, 1, cols};
}

Projection Binder::linear(const std::string& name, int64_t outputs, int64_t inputs, bool bias) {
  Projection p{{{matrix(name + ".weight", outputs, inputs), 0}}, outputs, {}};
  if (bias) p.bias = vector(name + ".bias", outputs, 0);
  return p;
}

std::vector<float> Binder::vector(const std::string& name, int64_t size, float offset) {
  const TensorView& view = take(name, {size}, false);
  std::vector<float> values(static_cast<size_t>(size));
  widen(*view.type, view.data, 0, size, values.data());
  for (float& value : values) value = offset + value;
  copied_bytes_ += size * static_cast<int64_t>(sizeof(float));
  return values;
}

Tensor Binder::tensor(const std::string& name, const Sizes& wanted, std::initializer_list<int64_t> sizes) {
  const TensorView& view = take(name, wanted, false);
  return dense(const_cast<void*>(view.data), *view.dtype, sizes);  // NOLINT: ops do not write their inputs
}

void Binder::finish(const std::function<bool(const std::string&)>& ignored, const char* describer) const {
  std::vector<std::string> extra;
  for (const auto& [name, view] : checkpoint_.tensors())
    if (!used_.count(name) && !ignored(name)) extra.push_back(name);
  if (extra.empty()) return;
  std::string others;
  for (size_t i = 1; i < extra.size() && i < 4; ++i) others += ", " + files::printable(extra[i]);
  if (extra.size() > 4) others += ", ...";
  refuse(extra.front(), std::string("is in the file, but the model that ") + describer + " describes has no such tensor (" +
                            std::to_string(extra.size()) + " of them" + others + ")");
}

void append(Projection& to, const Projection& part) {
  to.parts.reserve(to.parts.size() + part.parts.size());
  for (const ProjectionPart& p : part.parts) to.parts.push_back({p.w, to.outputs + p.column});
  if (!part.bias.empty()) {
    to.bias.resize(static_cast<size_t>(to.outputs), 0.0f);
    to.bias.insert(to.bias.end(), part.bias.begin(), part.bias.end());
  }
  to.outputs += part.outputs;
}

}  // namespace weft::model
