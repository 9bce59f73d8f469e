// GEMMs by cuBLASLt: see gemm.h.
#include <cublasLt.h>
#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "core/check.h"
#include "cuda/runner.h"
#include "model/network/cuda/gemm.h"

namespace weft::model::cuda {
namespace {

constexpr const char* kOp = "model";
constexpr size_t kMostPlans = 512;

}  // namespace

struct Blas::Library {
  decltype(&::cublasLtCreate) cublasLtCreate = nullptr;
  decltype(&::cublasLtDestroy) cublasLtDestroy = nullptr;
  decltype(&::cublasLtMatmul) cublasLtMatmul = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) cublasLtMatmulAlgoGetHeuristic = nullptr;
  decltype(&::cublasLtMatmulDescCreate) cublasLtMatmulDescCreate = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) cublasLtMatmulDescDestroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) cublasLtMatmulDescSetAttribute = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) cublasLtMatrixLayoutCreate = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) cublasLtMatrixLayoutDestroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) cublasLtMatmulPreferenceCreate = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) cublasLtMatmulPreferenceDestroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) cublasLtMatmulPreferenceSetAttribute = nullptr;
  std::string why_not;

  Library() {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
      const char* error = dlerror();
      why_not = name + " cannot be loaded (" + (error ? error : "no reason given") + "); it comes with the CUDA toolkit " +
                std::to_string(CUBLAS_VER_MAJOR) + ", and its folder must be on the loader's search path (LD_LIBRARY_PATH)";
      return;
    }
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
      if (!function) why_not = name + " lacks " + symbol;
    };
    find(cublasLtCreate, "cublasLtCreate");
    find(cublasLtDestroy, "cublasLtDestroy");
    find(cublasLtMatmul, "cublasLtMatmul");
    find(cublasLtMatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(cublasLtMatmulDescCreate, "cublasLtMatmulDescCreate");
    find(cublasLtMatmulDescDestroy, "cublasLtMatmulDescDestroy");
    find(cublasLtMatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
    find(cublasLtMatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
    find(cublasLtMatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
    find(cublasLtMatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
    find(cublasLtMatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
    find(cublasLtMatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  }
};

const Blas::Library& Blas::library() {
  static const auto* const one = new Library;  // never destroyed: see ledger() in memory.cc
  return *one;
}

namespace {

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(
        fail(Code::device_error, kOp, "dense layers",
             std::string("need ") + what + " of cuBLASLt, which failed with status " + std::to_string(static_cast<int>(status))));
}

}  // namespace

struct Blas::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  ~Plan() {
    const Library& lib = library();
    if (y) lib.cublasLtMatrixLayoutDestroy(y);
    if (x) lib.cublasLtMatrixLayoutDestroy(x);
    if (w) lib.cublasLtMatrixLayoutDestroy(w);
    if (operation) lib.cublasLtMatmulDescDestroy(operation);
  }
};

Blas::Blas(int device) {
  const Library& lib = library();
  if (!lib.why_not.empty()) throw Error(fail(Code::unsupported, kOp, "dense layers", "on cuda need cuBLASLt: " + lib.why_not));
  const weft::cuda::OnDevice on(device, kOp);
  cublasLtHandle_t handle = nullptr;
  check(lib.cublasLtCreate(&handle), "cublasLtCreate");
  handle_ = handle;
}

Blas::~Blas() {
  plans_.clear();
  if (handle_) library().cublasLtDestroy(static_cast<cublasLtHandle_t>(handle_));
}

bool Blas::fits(const DeviceMatrix& w, const Tensor& x, const Tensor& y) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return w.cols % 8 == 0 && x.strides[0] % 8 == 0 && y.strides[0] % 4 == 0 && aligned(w.data) && aligned(x.data) && aligned(y.data);
}

// cuBLAS matrices are column-major: y^T [N, M] = w [N, K] x^T [K, M].
const Blas::Plan& Blas::plan(const DeviceMatrix& w, const Tensor& x, const Tensor& y) {
  const std::tuple key{x.sizes[0], w.rows, w.cols, x.strides[0], y.strides[0]};
  if (const auto found = plans_.find(key); found != plans_.end()) return *found->second;
  if (plans_.size() >= kMostPlans) plans_.clear();
  const Library& lib = library();
  auto plan = std::make_unique<Plan>();
  check(lib.cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check(lib.cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
        "cublasLtMatmulDescSetAttribute");
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  check(lib.cublasLtMatrixLayoutCreate(&plan->w, CUDA_R_16F, size(w.cols), size(w.rows), w.cols), "cublasLtMatrixLayoutCreate");
  check(lib.cublasLtMatrixLayoutCreate(&plan->x, CUDA_R_16F, size(w.cols), size(x.sizes[0]), x.strides[0]),
        "cublasLtMatrixLayoutCreate");
  check(lib.cublasLtMatrixLayoutCreate(&plan->y, CUDA_R_32F, size(w.rows), size(x.sizes[0]), y.strides[0]),
        "cublasLtMatrixLayoutCreate");

  cublasLtMatmulPreference_t preference = nullptr;
  check(lib.cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
    return lib.cublasLtMatmulPreferenceSetAttribute(preference, what, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
  for (auto what : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(what, uint32_t{16});
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status = lib.cublasLtMatmulAlgoGetHeuristic(static_cast<cublasLtHandle_t>(handle_), plan->operation, plan->w,
                                                                   plan->x, plan->y, plan->y, preference, 1, &result, &found);
  lib.cublasLtMatmulPreferenceDestroy(preference);
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0) check(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic");
  plan->algorithm = result.algo;
  return *plans_.emplace(key, std::move(plan)).first->second;
}

void Blas::multiply(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add, void* workspace) {
  const weft::cuda::OnDevice on(stream.device, kOp);
  const Plan& p = plan(w, x, y);
  const float beta = add ? 1 : 0;
  check(library().cublasLtMatmul(static_cast<cublasLtHandle_t>(handle_), p.operation, &w.alpha, w.data, p.w, x.data, p.x, &beta,
                                 y.data, p.y, y.data, p.y, &p.algorithm, workspace, kWorkspace, weft::cuda::queue_of(stream)),
        "cublasLtMatmul");
}

}  // namespace weft::model::cuda
