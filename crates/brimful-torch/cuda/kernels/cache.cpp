// Cache of compiled kernels on disk: brimful/kernels/KEY.cubin in $XDG_CACHE_HOME or ~/.cache. A first line holds
// the key, the length and a checksum; the bytes follow.

#include "cache.h"

#include "ours.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>

namespace fs = std::filesystem;

namespace brimful::kernels {

namespace {

// 64-bit FNV-1a.
uint64_t hash(const std::string& bytes, uint64_t start) {
  uint64_t value = start;
  for (const char byte : bytes) value = (value ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return value;
}

constexpr uint64_t kStart = 14695981039346656037u;
// Second start value, so that two hashes make 128 bits.
constexpr uint64_t kOtherStart = 7809847782465536322u;

std::string digits(uint64_t value) {
  char text[17];
  snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

fs::path folder() {
  const char* cache = getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache == '/') return fs::path(cache) / "brimful" / "kernels";
  const char* home = getenv("HOME");
  if (home == nullptr || *home != '/') return {};
  return fs::path(home) / ".cache" / "brimful" / "kernels";
}

// File descriptor, closed on destruction.
class Opened {
 public:
  explicit Opened(int number) : number(number) {}
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    if (number >= 0) close(number);
  }

  // Returns whether the file is open, has this type, and only this user (or root) may write to it. Other writers
  // could inject code.
  bool serves(mode_t type) const {
    struct stat seen{};
    return number >= 0 && fstat(number, &seen) == 0 && (seen.st_mode & S_IFMT) == type &&
           is_ours_alone(seen);
  }

  const int number;
};

// Opens the folder. Callers open it once, so that it cannot be swapped between check and use.
int open_folder() { return open(folder().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

std::string file_of(const std::string& key) { return key + ".cubin"; }

int open_kept(const Opened& folder, const std::string& key) {
  if (!folder.serves(S_IFDIR)) return -1;
  return openat(folder.number, file_of(key).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

// Reads as far as possible.
std::string read_all(int file) {
  std::string all;
  char some[1 << 16];
  for (ssize_t count = 0; (count = read(file, some, sizeof(some))) > 0;) all.append(some, count);
  return all;
}

bool write_all(int file, const std::string& all) {
  for (size_t done = 0; done < all.size();) {
    const ssize_t count = write(file, all.data() + done, all.size() - done);
    if (count <= 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

std::string first_line(const std::string& key, const std::string& cubin) {
  std::ostringstream line;
  line << "brimful kernel 1 " << key << ' ' << cubin.size() << ' ' << digits(hash(cubin, kStart));
  return line.str();
}

// Returns a name that no other live thread or process uses.
std::string temporary(const std::string& file) {
  static std::atomic<uint64_t> next{0};
  return file + "." + std::to_string(getpid()) + "." + std::to_string(next++);
}

void write_whole(const std::string& file, const std::string& all) {
  fs::create_directories(folder().parent_path());
  mkdir(folder().c_str(), S_IRWXU);
  const Opened in(open_folder());
  // If the folder is ours but others may write to it, as with another umask, it is made private.
  if (in.number >= 0 && !in.serves(S_IFDIR)) fchmod(in.number, S_IRWXU);
  if (!in.serves(S_IFDIR)) return;
  constexpr int kNew = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  std::string part;
  int created = -1;
  // A killed process with the same id may have left such files.
  for (int tries = 0; created < 0 && tries < 16; ++tries) {
    part = temporary(file);
    created = openat(in.number, part.c_str(), kNew, S_IRUSR | S_IWUSR);
  }
  const Opened out(created);
  if (out.number < 0) return;
  const bool whole = write_all(out.number, all);
  const bool placed = whole && renameat(in.number, part.c_str(), in.number, file.c_str()) == 0;
  if (!placed) unlinkat(in.number, part.c_str(), 0);
}

}  // namespace

std::string cache_key(const std::string& all) {
  return digits(hash(all, kStart)) + digits(hash(all, kOtherStart));
}

bool is_cached(const std::string& key) {
  const Opened in(open_folder());
  return Opened(open_kept(in, key)).serves(S_IFREG);
}

std::optional<std::string> read_cache(const std::string& key) {
  const Opened in(open_folder());
  const Opened file(open_kept(in, key));
  if (!file.serves(S_IFREG)) return std::nullopt;
  std::string all = read_all(file.number);
  const size_t end = all.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string cubin = all.substr(end + 1);
  if (all.compare(0, end, first_line(key, cubin)) != 0) return std::nullopt;
  return cubin;
}

void write_cache(const std::string& key, const std::string& cubin) noexcept {
  try {
    if (!folder().empty()) write_whole(file_of(key), first_line(key, cubin) + "\n" + cubin);
  } catch (const std::exception&) {
    // A full or read-only disk costs only a second at the next start.
  }
}

}  // namespace brimful::kernels
