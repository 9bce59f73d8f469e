// libggml-weft.so: a ggml backend with one device, which computes the ops of find_op() in the memory of ggml's cpu backend.
//
// The device is an accelerator beside the cpu, as ggml's BLAS backend is. Its buffer type is that of the cpu backend, so the scheduler
// moves nodes here without copies. Nodes that takes() declines stay with the cpu backend.
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "engine.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "host_check.h"
#include "statistics.h"

namespace weft_ggml {
namespace {

constexpr const char* kName = "Weft";

bool computes_nothing(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE: return true;
    default: return false;
  }
}

// ---- backend

Engine& engine_of(ggml_backend_t backend) { return *static_cast<Engine*>(backend->context); }

void free_backend(ggml_backend_t backend) {
  delete &engine_of(backend);
  delete backend;
}

// The first node from index i on that must be computed, or null. Sets i to the index after this node.
ggml_tensor* next_node(ggml_cgraph* graph, int& i) {
  while (i < ggml_graph_n_nodes(graph)) {
    ggml_tensor* node = ggml_graph_node(graph, i++);
    if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 && !computes_nothing(node)) return node;
  }
  return nullptr;
}

void compute_nodes(Engine& engine, ggml_cgraph* graph) {
  int i = 0;
  ggml_tensor* node = next_node(graph, i);
  while (node) {
    ggml_tensor* next = next_node(graph, i);
    const Op* op = find_op(node);
    if (!op || !op->takes(node))
      throw std::runtime_error(std::string(ggml_op_desc(node)) + " of node " + node->name + " is not one that supports_op() takes");
    Measured measured(*op, node);
    const int computed = op->compute(engine, node, next);
    measured.done();
    node = computed == 1 ? next : next_node(graph, i);
  }
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    compute_nodes(engine_of(backend), graph);
    return GGML_STATUS_SUCCESS;
  } catch (const std::exception& error) {
    tell((std::string("a graph failed: ") + error.what()).c_str());
  } catch (...) {
    tell("a graph failed with an exception of unknown type");
  }
  return GGML_STATUS_FAILED;
}

void set_n_threads(ggml_backend_t backend, int threads) { engine_of(backend).stream.threads = threads > 0 ? threads : 1; }

ggml_guid_t guid() {
  static ggml_guid id = {0x77, 0x65, 0x66, 0x74, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x9a, 0x41, 0xc5, 0x1e, 0x70, 0x3b, 0xd2};
  return &id;
}

// ---- device

void get_memory(ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; }  // it has none of its own

void get_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = ggml_backend_dev_name(device);
  props->description = ggml_backend_dev_description(device);
  props->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
  props->caps.buffer_from_host_ptr = true;
  props->caps.mmap_support = true;
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char*) try {
  auto engine = std::make_unique<Engine>();
  auto backend = std::make_unique<ggml_backend>();
  backend->guid = guid();
  backend->iface.get_name = [](ggml_backend_t) { return kName; };
  backend->iface.free = free_backend;
  backend->iface.graph_compute = compute_graph;
  backend->device = device;
  backend->context = engine.release();
  return backend.release();
} catch (const std::exception& error) {
  tell((std::string("no backend: ") + error.what()).c_str());
  return nullptr;
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor* node) try {
  if (computes_nothing(node)) return true;
  const Op* op = find_op(node);
  return op && op->takes(node);
} catch (...) {
  return false;
}

ggml_backend_device_i device_interface() {
  ggml_backend_device_i made{};
  made.get_name = [](ggml_backend_dev_t) { return kName; };
  made.get_description = [](ggml_backend_dev_t) { return "token mixers of hybrid models on the cpu"; };
  made.get_memory = get_memory;
  made.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
  made.get_props = get_props;
  made.init_backend = init_backend;
  made.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
  made.buffer_from_host_ptr = [](ggml_backend_dev_t, void* data, size_t size, size_t) {
    return ggml_backend_cpu_buffer_from_ptr(data, size);
  };
  made.supports_op = supports_op;
  made.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return ggml_backend_buft_is_host(type); };
  return made;
}

// ---- registry

ggml_backend_dev_t get_device(ggml_backend_reg_t registry, size_t index) {
  static ggml_backend_device device{device_interface(), registry, nullptr};
  return index == 0 ? &device : nullptr;
}

void* get_proc_address(ggml_backend_reg_t, const char* name) {
  return std::strcmp(name, "ggml_backend_set_n_threads") == 0 ? reinterpret_cast<void*>(set_n_threads) : nullptr;
}

ggml_backend_reg_t registry() {
  static ggml_backend_reg made{
      GGML_BACKEND_API_VERSION,
      {[](ggml_backend_reg_t) { return kName; }, [](ggml_backend_reg_t) -> size_t { return 1; }, get_device, get_proc_address},
      nullptr};
  return &made;
}

}  // namespace
}  // namespace weft_ggml

// ggml calls this after loading the library. If it returns null, ggml continues without the library.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) try {
  if (const std::string refusal = weft_ggml::refusal_of_host(); !refusal.empty()) {
    weft_ggml::tell((refusal + ". Continuing without Weft").c_str());
    return nullptr;
  }
  return weft_ggml::registry();
} catch (...) {
  return nullptr;
}
