// The list of backends, the devices they find, and the streams they take.
#include "core/backend.h"

#include <stdexcept>
#include <string>

#include "core/check.h"
#include "core/op_limits.h"
#include "weft/schema.h"

namespace weft {
namespace {

// Rules of Stream that hold whatever the op.
Status check_fields(const Stream& stream, const char* op, Place place) {
  const auto refuse = [&](const std::string& what) { return fail(Code::invalid_argument, op, "stream", what); };
  if (stream.threads < 0) return refuse("has threads " + std::to_string(stream.threads) + ", wanted 0 or more");
  if (stream.isa != Isa::best && stream.backend != Backend::cpu)
    return refuse(std::string("asks for isa ") + isa_name(stream.isa) + ", but only the cpu backend has instruction sets");
  if (place == Place::host && stream.device != 0)
    return refuse("has device " + std::to_string(stream.device) + ", wanted 0 on backend " + backend_name(stream.backend));
  if (place == Place::host && stream.queue)
    return refuse(std::string("has a queue, but backend ") + backend_name(stream.backend) + " computes on the calling thread");
  return {};
}

}  // namespace

const BackendTable* find_backend(Backend backend) {
  switch (backend) {
    case Backend::reference: return reference_backend();
    case Backend::cpu: return cpu_backend();
    case Backend::cuda: return cuda_backend();
    case Backend::vulkan: return vulkan_backend();
  }
  return nullptr;
}

Status check_stream(const Stream& stream, const char* op) {
  const BackendTable* table = find_backend(stream.backend);
  if (!table)
    return fail(Code::unsupported, op, "stream", std::string("backend ") + backend_name(stream.backend) + " is not in this build");
  if (Status status = check_fields(stream, op, table->place); !status) return status;
  return table->check_stream ? table->check_stream(stream, op) : Status{};
}

std::vector<DeviceInfo> devices(Backend backend) {
  std::vector<DeviceInfo> found;
  const BackendTable* table = find_backend(backend);
  if (table && table->list_devices) table->list_devices(found);
  if (!table) found.push_back({backend, 0, backend_name(backend), "", false, "not in this build"});
  return found;
}

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> found;
  for (Backend backend : {Backend::reference, Backend::cpu, Backend::cuda, Backend::vulkan})
    for (DeviceInfo& device : devices(backend)) found.push_back(std::move(device));
  return found;
}

std::string legal_shapes(std::string_view op) {
#define WEFT_LEGAL_SHAPES(name, Args) \
  if (op == #name) return legal_shapes(Args{});
  WEFT_FOR_EACH_OP(WEFT_LEGAL_SHAPES)
#undef WEFT_LEGAL_SHAPES
  throw std::logic_error("there is no op " + std::string(op));
}

std::optional<OpSupport> op_support(Backend backend, std::string_view op) {
  std::optional<OpSupport> found;
  if (const BackendTable* table = find_backend(backend))
    for_each_entry(*table, [&](const char* name, const Limits* limits) {
      if (op == name && limits) found = {limits->dtypes, limits->shapes};
    });
  return found;
}

}  // namespace weft
