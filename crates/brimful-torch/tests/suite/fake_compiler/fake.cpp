// Fake compiler with NVRTC's functions that turns every source into the same few bytes. The first compilation of
// a program with FAKE_FULL in its environment runs out of memory.
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {
constexpr char kCubin[] = "a kernel that no card runs";
bool has_refused = false;
}  // namespace

extern "C" {
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0; }
int nvrtcCreateProgram(
    void** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = &has_refused;
  return 0;
}
int nvrtcCompileProgram(void*, int, const char* const*) {
  if (std::getenv("FAKE_FULL") == nullptr || has_refused) return 0;
  has_refused = true;
  return 1;
}
int nvrtcDestroyProgram(void**) { return 0; }
int nvrtcGetProgramLogSize(void*, size_t* size) { return *size = 0; }
int nvrtcGetProgramLog(void*, char*) { return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { return *size = sizeof(kCubin), 0; }
int nvrtcGetCUBIN(void*, char* to) { return std::memcpy(to, kCubin, sizeof(kCubin)), 0; }
}
