// Conversions of single values, and faults as codes: see convert.h.
#include "c/convert.h"

#include <iterator>

#include "core/fail.h"

namespace weft::c {
namespace {

weft_code code_of(Code code) {
  switch (code) {
    case Code::ok: return WEFT_OK;
    case Code::invalid_argument: return WEFT_INVALID_ARGUMENT;
    case Code::unsupported: return WEFT_UNSUPPORTED;
    case Code::scratch_too_small: return WEFT_SCRATCH_TOO_SMALL;
    case Code::device_error: return WEFT_DEVICE_ERROR;
  }
  return WEFT_INTERNAL_ERROR;
}

// Refuses a number that does not fit, before a narrower type cuts it.
void check_range(const char* op, const Path& member, const char* what, int32_t value, int32_t last) {
  if (value < 0 || value > last)
    refuse(op, member, std::string("has ") + what + " " + std::to_string(value) + ", wanted 0.." + std::to_string(last));
}

}  // namespace

void refuse(const char* op, const Path& argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, op, argument.text(), what));
}

void check_struct_size(const char* op, const char* argument, size_t got, size_t known, size_t align) {
  const Path member = Path(argument).in("struct_size");
  if (got < sizeof(size_t) || got % align != 0) refuse(op, member, "is " + std::to_string(got) + ", wanted sizeof the struct");
  if (got > known)
    refuse(op, member,
           "is " + std::to_string(got) + ", this library knows " + std::to_string(known) + ": it is older than the caller");
}

weft_code report(weft_status* status, weft_code code, const char* op, const char* argument, const char* message) noexcept {
  if (!status || status->struct_size <= offsetof(weft_status, op)) return code;
  weft_status full{};
  full.struct_size = status->struct_size;
  full.code = code;
  copy_text(full.op, op);
  copy_text(full.argument, argument);
  copy_text(full.message, message);
  // A caller with an older, shorter struct gets its part, terminated.
  const size_t room = std::min(status->struct_size, sizeof full);
  std::memcpy(status, &full, room);
  reinterpret_cast<char*>(status)[room - 1] = '\0';
  return code;
}

weft_code report(weft_status* status, const Status& fault) noexcept {
  return report(status, code_of(fault.code), fault.op.c_str(), fault.argument.c_str(), fault.message.c_str());
}

weft_code report_ok(weft_status* status) noexcept { return report(status, WEFT_OK, "", "", ""); }

int32_t dtype_value(DType dtype) {
  const auto& values = EnumValues<DType>::kTable.values;
  const auto found = std::find_if(values.begin(), values.end(), [&](const auto& entry) { return entry.value == dtype; });
  return static_cast<int32_t>(found - values.begin());
}

Tensor to_tensor(const char* op, const Path& member, const weft_tensor& from) {
  constexpr auto& kTypes = EnumValues<DType>::kTable.values;
  check_range(op, member, "rank", from.rank, Tensor::kMaxRank);
  if (from.rank == 0) return {};
  check_range(op, member, "dtype", from.dtype, static_cast<int32_t>(kTypes.size()) - 1);
  constexpr auto& kPlaces = EnumValues<Place>::kTable.values;
  if (from.place < 0 || from.place >= static_cast<int32_t>(kPlaces.size()))
    refuse(op, member, "has place " + std::to_string(from.place) + ", wanted WEFT_HOST, WEFT_CUDA or WEFT_VULKAN");
  check_range(op, member, "device", from.device, INT8_MAX);
  Tensor tensor;
  tensor.data = from.data;
  tensor.dtype = kTypes[static_cast<size_t>(from.dtype)].value;
  tensor.place = kPlaces[static_cast<size_t>(from.place)].value;
  tensor.device = static_cast<int8_t>(from.device);
  tensor.rank = static_cast<int8_t>(from.rank);
  std::copy(std::begin(from.sizes), std::end(from.sizes), tensor.sizes.begin());
  std::copy(std::begin(from.strides), std::end(from.strides), tensor.strides.begin());
  return tensor;
}

bool to_flag(const char* op, const Path& member, int32_t value) {
  if (value != 0 && value != 1) refuse(op, member, "is " + std::to_string(value) + ", wanted 0 or 1");
  return value == 1;
}

const KvRecipe& to_recipe(const char* op, const Path& member, const weft_kv_recipe* recipe) {
  if (!recipe) refuse(op, member, "is null, wanted one from weft_kv_recipe_create()");
  return recipe->recipe;
}

Stream to_stream(const char* op, const weft_stream* from) {
  if (!from) return {};
  const weft_stream stream = full_copy(op, "stream", from);
  const Path at = "stream";
  return {to_enum<Backend>(op, at.in("backend"), stream.backend), stream.device, stream.queue, stream.threads,
          to_enum<Isa>(op, at.in("isa"), stream.isa)};
}

}  // namespace weft::c
