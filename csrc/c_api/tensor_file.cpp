#include "c_api/tensor_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "c_api/json.h"

namespace qfx {
namespace {

constexpr int64_t kLength = 8;                   // bytes of the length of a header
constexpr int64_t kLongestHeader = 100'000'000;  // as the package safetensors has it
constexpr int64_t kMost = int64_t{1} << 48;

constexpr std::pair<const char*, int64_t> kTypes[] = {
    {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
    {"C64", 8}, {"I64", 8}, {"I32", 4}, {"I16", 2},  {"I8", 1},      {"U64", 8},
    {"U32", 4}, {"U16", 2}, {"U8", 1},  {"BOOL", 1}};

class File {
 public:
  explicit File(const std::string& path) : path_(path) {
    check();  // before a pipe or a device is opened
    number_ = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    size_ = number_ < 0 ? -1 : lseek(number_, 0, SEEK_END);
    if (size_ < 0 || lseek(number_, 0, SEEK_SET) != 0) {
      const int why = errno;
      if (number_ >= 0) close(number_);
      errno = why;
      fail();
    }
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(number_); }

  int64_t size() const { return size_; }

  void read_into(char* to, int64_t count) {
    constexpr int64_t kAtOnce = 1 << 30;
    while (count > 0) {
      const ssize_t found = ::read(number_, to, static_cast<size_t>(std::min(count, kAtOnce)));
      if (found < 0 && errno == EINTR) continue;
      if (found < 0) fail();
      if (found == 0) throw Refused("it became shorter as it was read");
      to += found, count -= found;
    }
  }

 private:
  [[noreturn]] void fail() const {
    throw Unreadable(printable(path_) + ": " + std::strerror(errno));
  }

  void check() const {
    struct statx about = {};  // glibc has it from 2.28 on, and stat under this name from 2.33 on
    if (statx(AT_FDCWD, path_.c_str(), 0, STATX_TYPE, &about) != 0) fail();
    if (S_ISREG(about.stx_mode)) return;
    const bool folder = S_ISDIR(about.stx_mode);
    throw Unreadable(printable(path_) + " is " + (folder ? "a folder" : "no file") +
                     ", expected a regular file");
  }

  const std::string& path_;
  int number_ = -1;
  int64_t size_ = 0;
};

struct Entry {
  std::string name;
  Tensor tensor;
  int64_t begin, end;
};

int64_t element_of(const std::string& type, const std::string& name) {
  for (const auto& [known, bytes] : kTypes) {
    if (type == known) return bytes;
  }
  throw Refused("tensor '" + printable(name) + "' is of type '" + printable(type) +
                "', which this qfx does not read");
}

Entry entry_of(const std::string& name, const Json& told) {
  const std::string what = "a number of tensor '" + printable(name) + "'";
  told.as_object("tensor '" + printable(name) + "'");
  Entry found = {name, {told.at("dtype").as_text(what), {}, nullptr, 0}, 0, 0};
  int64_t bytes = element_of(found.tensor.type, name);
  for (const Json& size : told.at("shape").as_list(what)) {
    found.tensor.shape.push_back(size.integer_in(0, kMost, what));
    if (__builtin_mul_overflow(bytes, found.tensor.shape.back(), &bytes)) bytes = -1;
    if (bytes < 0 || bytes > kMost) throw Refused(what + " is too large");
  }
  const std::vector<Json>& offsets = told.at("data_offsets").as_list(what);
  if (offsets.size() != 2) throw Refused(what + " is missing");
  found.begin = offsets[0].integer_in(0, kMost, what);
  found.end = offsets[1].integer_in(0, kMost, what);
  if (found.end - found.begin != bytes) {
    throw Refused("tensor '" + printable(name) + "' has " +
                  std::to_string(found.end - found.begin) + " bytes, and its shape " +
                  std::to_string(bytes));
  }
  found.tensor.bytes = bytes;
  return found;
}

// In the order of their bytes, which fill `bytes`.
std::vector<Entry> entries_of(const Json& header, int64_t bytes) {
  std::vector<Entry> found;
  for (size_t i = 0; i < header.items.size(); ++i) {
    if (header.names[i] == "__metadata__") continue;
    found.push_back(entry_of(header.names[i], header.items[i]));
  }
  std::stable_sort(found.begin(), found.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = 0;
  for (const Entry& each : found) {
    if (each.begin != end) {
      throw Refused("tensor '" + printable(each.name) + "' begins at byte " +
                    std::to_string(each.begin) + ", and the one before ends at " +
                    std::to_string(end));
    }
    end = each.end;
  }
  if (end != bytes) {
    throw Refused("it has " + std::to_string(bytes) + " bytes of tensors, and its header says " +
                  std::to_string(end));
  }
  return found;
}

Json header_of(File& file, int64_t* length) {
  if (file.size() < kLength) throw Refused("it has fewer than 8 bytes");
  unsigned char first[kLength];
  file.read_into(reinterpret_cast<char*>(first), kLength);
  uint64_t stated = 0;
  for (int i = kLength - 1; i >= 0; --i) stated = stated << 8 | first[i];
  const auto room = static_cast<uint64_t>(std::min(file.size() - kLength, kLongestHeader));
  if (stated > room) {
    throw Refused("its header has " + std::to_string(stated) + " bytes, and there is room for " +
                  std::to_string(room));
  }
  *length = static_cast<int64_t>(stated);
  std::string text(stated, '\0');
  file.read_into(text.data(), *length);
  Json header = parsed_json(text);
  header.as_object("its header");
  return header;
}

}  // namespace

const Tensor& TensorFile::at(const std::string& name) const {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw Refused("it has no tensor '" + printable(name) + "'");
  return found->second;
}

TensorFile read_tensors(const std::string& path, int64_t max_memory) {
  File file(path);
  int64_t length = 0;
  const Json header = header_of(file, &length);
  TensorFile found;
  if (const Json* metadata = header.find("__metadata__")) {
    metadata->as_object("its metadata");
    for (size_t i = 0; i < metadata->items.size(); ++i) {
      found.metadata[metadata->names[i]] = metadata->items[i].as_text("a value of its metadata");
    }
  }
  const int64_t bytes = file.size() - kLength - length;
  std::vector<Entry> entries = entries_of(header, bytes);
  if (bytes > max_memory) {
    throw Refused("its tensors have " + std::to_string(bytes) + " bytes, and max_memory is " +
                  std::to_string(max_memory));
  }
  int64_t room = 0;
  for (const Entry& each : entries) room += whole_lines(each.tensor.bytes);
  found.memory = Pages(room, "for the tensors of " + printable(path));
  char* to = found.memory.begin();
  for (Entry& each : entries) {
    each.tensor.data = to;
    file.read_into(to, each.tensor.bytes);
    to += whole_lines(each.tensor.bytes);
    found.tensors.emplace(std::move(each.name), std::move(each.tensor));
  }
  return found;
}

}  // namespace qfx
