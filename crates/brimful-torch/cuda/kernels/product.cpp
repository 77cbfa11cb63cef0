// Calls cuBLAS for a product whose scale factors are on the device: libtorch takes them only from the host, which
// would have to wait for them.

#include "product.h"

#include "../../bridge/version.h"
#include "source.h"

#include <c10/util/Exception.h>

#include <limits>
#include <string>

BRIMFUL_READ_AGAIN("at::cuda::getCurrentCUDABlasHandle, whose handle has the current stream and a workspace");

struct cublasContext;

// Declared here, because the build has no CUDA header. The symbols are weak, because everything else works without
// cuBLAS.
extern "C" {
__attribute__((weak)) int cublasSetPointerMode_v2(cublasContext* handle, int mode);
__attribute__((weak)) int cublasGemmEx(
    cublasContext* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a,
    int kind_a, int step_a, const void* b, int kind_b, int step_b, const void* beta, void* c,
    int kind_c, int step_c, int compute, int algorithm);
}

namespace at::cuda {
cublasContext* getCurrentCUDABlasHandle();
}

namespace brimful::kernels {

namespace {

// Numbered as in cublas_api.h and library_types.h.
constexpr int kPointersToHost = 0, kPointersToDevice = 1;
constexpr int kAsItIs = 0, kTransposed = 1;
constexpr int kFloat = 0, kHalf = 2, kBFloat16 = 14;
constexpr int kComputeFloat = 68;
constexpr int kAnyAlgorithm = -1;

constexpr int kAllocationFailed = 3;

void check(int status) {
  if (status == kAllocationFailed) {
    throw c10::OutOfMemoryError("CUBLAS_STATUS_ALLOC_FAILED in a product", nullptr);
  }
  if (status != 0) throw KernelError("cuBLAS answers " + std::to_string(status));
}

// Scope in which cuBLAS reads factors from the device. The handle is libtorch's, whose own products pass factors
// from the host.
class FactorsOnDevice {
 public:
  explicit FactorsOnDevice(cublasContext* handle) : handle_(handle) {
    check(cublasSetPointerMode_v2(handle, kPointersToDevice));
  }
  ~FactorsOnDevice() { cublasSetPointerMode_v2(handle_, kPointersToHost); }
  FactorsOnDevice(const FactorsOnDevice&) = delete;
  FactorsOnDevice& operator=(const FactorsOnDevice&) = delete;

 private:
  cublasContext* handle_;
};

int as_int(int64_t number) {
  if (number > std::numeric_limits<int>::max()) {
    throw KernelError("a product with a side of " + std::to_string(number) + " is too large");
  }
  return static_cast<int>(number);
}

}  // namespace

// cuBLAS is column-major, so it sees the transpose: outᵀ = bᵀ · a.
void add_scaled_product(const ScaledProduct& product, NumberKind kind) {
  if (cublasGemmEx == nullptr || cublasSetPointerMode_v2 == nullptr) {
    throw KernelError("there is no cuBLAS");
  }
  const int number = kind == NumberKind::kF16 ? kHalf : kBFloat16;
  const int columns = as_int(product.columns), rows = as_int(product.rows);
  const int b_step = as_int(product.b_step), a_step = as_int(product.a_step);
  auto* handle = at::cuda::getCurrentCUDABlasHandle();
  const FactorsOnDevice factors(handle);
  check(cublasGemmEx(
      handle, kAsItIs, kTransposed, columns, rows, as_int(product.inner), product.factor, product.b,
      number, b_step, product.a, number, a_step, product.one, product.out, kFloat, columns,
      kComputeFloat, kAnyAlgorithm));
}

}  // namespace brimful::kernels
