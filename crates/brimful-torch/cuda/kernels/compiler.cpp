// Finds NVRTC and compiles kernels with it, on demand or ahead of their use.
//
// NVRTC lies beside libtorch's other CUDA libraries, which the program has already loaded: in their folder, or in
// one of nvidia's packages next to it, provided others cannot write there. NVRTC's helper library must be loaded
// before NVRTC.

#include "compiler.h"

#include "cache.h"
#include "library.h"
#include "ours.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace brimful::kernels {

namespace {

using Program = void*;

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  return paths;
}

// Adds a library of the program if it is one of CUDA's.
int add_library(dl_phdr_info* info, size_t, void* libraries) {
  const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return 0;
  const std::string file = path.substr(slash + 1);
  for (const char* start : {"libtorch_cuda", "libcudart", "libcublas", "libcaffe2_nvrtc"}) {
    if (file.rfind(start, 0) == 0) {
      static_cast<std::vector<std::string>*>(libraries)->push_back(path);
      break;
    }
  }
  return 0;
}

// Returns the folder itself and the library folders of the packages next to it.
std::vector<std::string> folders_from(const std::string& folder) {
  std::vector<std::string> all{folder};
  for (const char* beside : {"/../../nvidia/*/lib", "/../../*/lib"}) {
    for (const auto& found : matches(folder + beside)) {
      std::error_code failed;
      const auto path = std::filesystem::canonical(found, failed);
      if (!failed) all.push_back(path);
    }
  }
  return all;
}

// Returns the others who may write to the file that a path leads to.
unsigned others_of_file(const std::string& path) {
  std::error_code failed;
  const auto file = std::filesystem::canonical(path, failed);
  return failed ? ~0u : others_of(file);
}

// Returns whether only these others may write to the compiler's libraries in this folder.
bool holds_no_others(const std::string& folder, unsigned others) {
  const auto libraries = matches(folder + "/libnvrtc*.so*");
  return std::all_of(libraries.begin(), libraries.end(), [others](const std::string& library) {
    return (others_of_file(library) & ~others) == 0;
  });
}

void* open_in(const std::string& folder) {
  const auto libraries = matches(folder + "/libnvrtc.so.*");
  if (libraries.empty()) return nullptr;
  for (const auto& helper : matches(folder + "/libnvrtc-builtins.so.*")) {
    dlopen(helper.c_str(), RTLD_NOW | RTLD_GLOBAL);
  }
  return dlopen(libraries.front().c_str(), RTLD_LAZY);
}

void* open_library() {
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) {
    if (void* library = dlopen(name, RTLD_LAZY)) return library;
  }
  std::vector<std::string> loaded;
  dl_iterate_phdr(&add_library, &loaded);
  std::string others;
  for (const auto& library : loaded) {
    // Anyone who may write to an already loaded library can run code here anyway, and is trusted.
    const unsigned trusted = others_of_file(library);
    for (const auto& folder : folders_from(library.substr(0, library.rfind('/')))) {
      if (!holds_no_others(folder, trusted)) {
        others = "; others may write to " + folder + ": let LD_LIBRARY_PATH name it if it is to be used";
      } else if (void* compiler = open_in(folder)) {
        return compiler;
      }
    }
  }
  throw KernelError(
      "NVRTC (libnvrtc.so.13 or .12) is not beside libtorch's CUDA libraries" + others);
}

// Out-of-memory status of NVRTC.
constexpr int kNoMemoryToCompile = 1;

void compiler_failed(const char* function, int error) {
  if (error == kNoMemoryToCompile) throw std::bad_alloc();
  throw KernelError(std::string(function) + " failed with " + std::to_string(error));
}

struct Nvrtc {
  template <class Signature>
  using Function = LibraryFunction<Signature>;

  const Library library{open_library(), "NVRTC", compiler_failed};
  Function<int(int*, int*)> version{library, "nvrtcVersion"};
  Function<int(
      Program*, const char* text, const char* name, int, const char* const*, const char* const*)>
      create{library, "nvrtcCreateProgram"};
  Function<int(Program, int, const char* const*)> compile{library, "nvrtcCompileProgram"};
  Function<int(Program*)> destroy{library, "nvrtcDestroyProgram"};
  Function<int(Program, size_t*)> log_size{library, "nvrtcGetProgramLogSize"};
  Function<int(Program, char*)> log{library, "nvrtcGetProgramLog"};
  Function<int(Program, size_t*)> cubin_size{library, "nvrtcGetCUBINSize"};
  Function<int(Program, char*)> cubin{library, "nvrtcGetCUBIN"};
};

const Nvrtc& nvrtc() {
  static const Nvrtc loaded;
  return loaded;
}

std::string log_of(Program program) {
  size_t size = 0;
  if (nvrtc().log_size.ask(program, &size) != 0 || size == 0) return "no reason given";
  std::string text(size, '\0');
  nvrtc().log.ask(program, text.data());
  text.resize(size - 1);
  return text;
}

std::string compile(const Source& source, const std::vector<std::string>& options) {
  Program program = nullptr;
  nvrtc().create(&program, source.text, source.name, 0, nullptr, nullptr);
  const auto destroy = [](Program made) { nvrtc().destroy.ask(&made); };
  // Destroys the program at the end of this scope.
  const std::unique_ptr<void, decltype(destroy)> owned(program, destroy);
  std::vector<const char*> words;
  for (const auto& option : options) words.push_back(option.c_str());
  const int answer = nvrtc().compile.ask(program, static_cast<int>(words.size()), words.data());
  if (answer == kNoMemoryToCompile) nvrtc().compile.check(answer);
  if (answer != 0) {
    throw KernelError(std::string(source.name) + " does not compile: " + log_of(program));
  }
  size_t size = 0;
  nvrtc().cubin_size(program, &size);
  std::string cubin(size, '\0');
  nvrtc().cubin(program, cubin.data());
  return cubin;
}

// True once the compiler has been used. The compiler creates its static data at first use, and statics are
// destroyed at exit in reverse order.
std::atomic<bool> has_compiled{false};

// Compilation job: source, options and cache key.
struct Order {
  Source source;
  std::vector<std::string> options;
  std::string key;

  Order(const Source& source, const std::vector<std::string>& defines, int architecture)
      : source(source),
        options{
            "--gpu-architecture=sm_" + std::to_string(architecture), "--std=c++17",
            "-default-device"} {
    for (const auto& define : defines) options.push_back("-D" + define);
    std::string all = source.text + std::string("\n") + compiler_version();
    for (const auto& option : options) all += "\n" + option;
    key = cache_key(all);
  }

  std::string run() const {
    std::string cubin = compile(source, options);
    has_compiled = true;
    write_cache(key, cubin);
    return cubin;
  }
};

// Background threads that run compilation jobs. When the program ends, jobs that have not begun are dropped.
class Workshop {
 public:
  Workshop() = default;
  Workshop(const Workshop&) = delete;
  Workshop& operator=(const Workshop&) = delete;

  ~Workshop() {
    closes_ = true;
    for (auto& thread : threads_) thread.join();
  }

  void take(Order order) {
    const std::lock_guard<std::mutex> alone(turn_);
    const std::string key = order.key;
    if (cubins_.count(key) != 0) return;
    tasks_.push_back({key, Task([order = std::move(order)] { return order.run(); })});
    cubins_.emplace(key, tasks_.back().task.get_future().share());
    add_thread();
  }

  // Waits for a job that a thread is compiling. Returns none if no thread has begun the job; the caller then runs
  // it.
  std::optional<std::string> finished(const std::string& key) {
    std::shared_future<std::string> cubin;
    {
      const std::lock_guard<std::mutex> alone(turn_);
      const auto found = cubins_.find(key);
      if (found == cubins_.end()) return std::nullopt;
      cubin = found->second;
      // Later requests find the kernel in the cache.
      cubins_.erase(found);
      const auto is_its = [&](const Waiting& waiting) { return waiting.key == key; };
      const auto waiting = std::find_if(tasks_.begin(), tasks_.end(), is_its);
      if (waiting != tasks_.end()) {
        tasks_.erase(waiting);
        return std::nullopt;
      }
    }
    return cubin.get();
  }

 private:
  using Task = std::packaged_task<std::string()>;

  struct Waiting {
    std::string key;
    Task task;
  };

  // Starts a thread, unless there is one per core. Requires that `turn_` is locked. If the system cannot start a
  // thread, the thread that needs a kernel compiles it.
  void add_thread() {
    if (working_ == std::max(std::thread::hardware_concurrency(), 1u)) return;
    try {
      threads_.emplace_back([this] { work(); });
      ++working_;
    } catch (const std::system_error&) {
    }
  }

  void work() {
    std::unique_lock<std::mutex> alone(turn_);
    while (!tasks_.empty() && !closes_) {
      auto task = std::move(tasks_.front().task);
      tasks_.pop_front();
      alone.unlock();
      task();
      alone.lock();
    }
    --working_;
  }

  std::mutex turn_;
  std::map<std::string, std::shared_future<std::string>> cubins_;
  std::deque<Waiting> tasks_;
  std::vector<std::thread> threads_;
  size_t working_ = 0;
  std::atomic<bool> closes_{false};
};

// True once the workshop exists.
std::atomic<bool> is_open{false};

// Returns the workshop. It must be created after the compiler's first use, so that its threads are joined before the
// compiler's static data are destroyed.
Workshop& workshop() {
  static Workshop all;
  is_open = true;
  return all;
}

}  // namespace

std::string compiler_version() {
  int major = 0;
  int minor = 0;
  nvrtc().version(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

void compile_ahead(const std::vector<Compiling>& all, int architecture) {
  try {
    for (const auto& [source, defines] : all) {
      Order order(source, defines, architecture);
      if (is_cached(order.key)) continue;
      if (has_compiled) {
        workshop().take(std::move(order));
      } else {
        order.run();
      }
    }
  } catch (const std::exception&) {
    // The thread that needs the kernel reports why it is not available.
  }
}

Cubin compiled(const Source& source, const std::vector<std::string>& defines, int architecture) {
  const Order order(source, defines, architecture);
  if (is_open) {
    if (auto ahead = workshop().finished(order.key)) return {std::move(*ahead), false};
  }
  if (auto kept = read_cache(order.key)) return {std::move(*kept), true};
  return {order.run(), false};
}

}  // namespace brimful::kernels
