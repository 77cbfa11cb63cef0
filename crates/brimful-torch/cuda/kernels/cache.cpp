// Compiled kernels on disk: $XDG_CACHE_HOME or ~/.cache, brimful/kernels/KEY.cubin. A first line says
// whose file it is, how long, and with which checksum; then come the bytes.

#include "cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace fs = std::filesystem;

namespace brimful::kernels {

namespace {

// FNV-1a, of 64 bits.
uint64_t hash(const std::string& bytes, uint64_t start) {
  uint64_t value = start;
  for (const char byte : bytes) value = (value ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return value;
}

constexpr uint64_t kStart = 14695981039346656037u;
// Another one, so that two hashes make 128 bits.
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

fs::path file_of(const std::string& key) {
  const fs::path in = folder();
  return in.empty() ? in : in / (key + ".cubin");
}

std::string first_line(const std::string& key, const std::string& cubin) {
  std::ostringstream line;
  line << "brimful kernel 1 " << key << ' ' << cubin.size() << ' ' << digits(hash(cubin, kStart));
  return line.str();
}

// A name that no other thread or process has at this moment.
fs::path temporary(const fs::path& file) {
  static std::atomic<uint64_t> next{0};
  return file.string() + "." + std::to_string(getpid()) + "." + std::to_string(next++);
}

void write_whole(const fs::path& file, const std::string& line, const std::string& cubin) {
  fs::create_directories(file.parent_path());
  const fs::path part = temporary(file);
  std::ofstream out(part, std::ios::binary);
  out << line << '\n' << cubin;
  out.close();
  std::error_code ignored;
  if (out.good()) fs::rename(part, file, ignored);
  fs::remove(part, ignored);
}

}  // namespace

std::string cache_key(const std::string& all) {
  return digits(hash(all, kStart)) + digits(hash(all, kOtherStart));
}

bool is_cached(const std::string& key) {
  std::error_code ignored;
  return fs::exists(file_of(key), ignored);
}

std::optional<std::string> read_cache(const std::string& key) {
  std::ifstream in(file_of(key), std::ios::binary);
  std::string line;
  if (!in || !std::getline(in, line)) return std::nullopt;
  std::string cubin{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (line != first_line(key, cubin)) return std::nullopt;
  return cubin;
}

void write_cache(const std::string& key, const std::string& cubin) noexcept {
  try {
    const fs::path file = file_of(key);
    if (!file.empty()) write_whole(file, first_line(key, cubin), cubin);
  } catch (const std::exception&) {
    // A full or read-only disk costs a second at the next start, and nothing else.
  }
}

}  // namespace brimful::kernels
