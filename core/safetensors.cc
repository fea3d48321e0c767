#include "core/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

namespace sherd {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little);

constexpr int64_t kMaxHeader = 100'000'000;  // the original library's limit too
constexpr int kMaxDepth = 2;                 // of an array or object inside the header's object

// The order of dtypes in a file that the original library writes: by width, then as it lists them.
int file_order(DType d) {
  return std::array{/*bool*/ 0,    /*uint8*/ 1,    /*int32*/ 4,   /*int64*/ 7,
                    /*float16*/ 2, /*bfloat16*/ 3, /*float32*/ 5, /*float64*/ 6}[int(d)];
}

// Parses, and refuses what a plain parse lets pass: a key twice, and nesting without end.
json parse_header(const std::string& text, const std::string& path) {
  std::array<std::set<std::string>, kMaxDepth + 1> keys;
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys[depth - 1].insert(key).second)
        fail("[safetensors] ", path, ": the header has '", key, "' twice");
    } else if (event == json::parse_event_t::object_start ||
               event == json::parse_event_t::array_start) {
      if (depth > kMaxDepth) fail("[safetensors] ", path, ": the header is nested too deeply");
      keys[depth].clear();
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& e) {
    fail("[safetensors] ", path, ": the header is not valid JSON: ", e.what());
  }
}

int64_t to_size(const json& v, const std::string& where) {
  if (!v.is_number_unsigned() || v.get<uint64_t>() > uint64_t(INT64_MAX))
    fail(where, ": sizes and offsets must be whole numbers, got ", v.dump(-1, ' ', true));
  return v.get<int64_t>();
}

}  // namespace

const char* safetensors_name(DType d) {
  return std::array{"BOOL", "U8", "I32", "I64", "F16", "BF16", "F32", "F64"}[int(d)];
}
std::optional<DType> safetensors_dtype(const std::string& name) {
  for (int d = 0; d < kDTypes; ++d)
    if (name == safetensors_name(DType(d))) return DType(d);
  return {};
}

// ---- reading

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor_ < 0) fail("[safetensors] ", path, ": ", std::strerror(errno));
  try {
    struct stat status;
    if (::fstat(descriptor_, &status) != 0)
      fail("[safetensors] ", path, ": ", std::strerror(errno));
    if (!S_ISREG(status.st_mode)) fail("[safetensors] ", path, " is not a regular file");
    const int64_t size = status.st_size;
    if (size < 8)
      fail("[safetensors] ", path, ": ", size, " bytes are too few for a header's length");
    uint64_t length;
    read_bytes(0, 8, &length, "the header's length");
    if (length > uint64_t(kMaxHeader))
      fail("[safetensors] ", path, ": a header of ", length, " bytes is above the limit of ",
           kMaxHeader, ": not a safetensors file?");
    if (int64_t(length) > size - 8)
      fail("[safetensors] ", path, ": cut short: the header has ", length, " bytes, the file ",
           size - 8, " after its length");
    std::string header(length, 0);
    read_bytes(8, int64_t(length), header.data(), "the header");
    data_begin_ = 8 + int64_t(length);
    parse(header);
    check_cover(size - data_begin_);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

SafetensorsReader::~SafetensorsReader() { ::close(descriptor_); }

void SafetensorsReader::parse(const std::string& text) {
  if (text.empty() || text[0] != '{')
    fail("[safetensors] ", path_, ": the header does not begin with '{': not a safetensors file?");
  const json header = parse_header(text, path_);
  for (const auto& [name, v] : header.items()) {
    if (name == "__metadata__") {
      if (!v.is_object()) fail("[safetensors] ", path_, ": __metadata__ is not an object");
      for (const auto& [key, value] : v.items()) {
        if (!value.is_string())
          fail("[safetensors] ", path_, ": metadata '", key, "' is not a string");
        metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    const std::string where = concat("[safetensors] ", path_, ": tensor '", name, "'");
    if (!v.is_object() || !v.contains("dtype") || !v.contains("shape") ||
        !v.contains("data_offsets"))
      fail(where, " needs dtype, shape and data_offsets");
    const json &dtype = v["dtype"], &shape = v["shape"], &offsets = v["data_offsets"];
    if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2)
      fail(where, ": dtype must be a name, shape a list, data_offsets a list of two");
    const auto type = safetensors_dtype(dtype.get<std::string>());
    if (!type)
      fail(where, " has dtype ", dtype.get<std::string>(),
           "; known are BOOL, U8, I32, I64, F16, BF16, F32, F64");
    if (shape.size() > size_t(kMaxDims))
      fail(where, " has ", shape.size(), " dimensions, at most ", kMaxDims, " are supported");
    Info info{name, *type, {}, to_size(offsets[0], where), 0};
    int64_t bytes = size_of(*type);
    bool overflows = false, empty = false;
    for (const json& s : shape) {
      info.shape.push(to_size(s, where));
      empty = empty || info.shape[info.shape.n - 1] == 0;
      overflows |= __builtin_mul_overflow(bytes, info.shape[info.shape.n - 1], &bytes);
    }
    if (overflows && !empty) fail(where, " is too large: shape ", info.shape);
    info.bytes = empty ? 0 : bytes;
    const int64_t end = to_size(offsets[1], where);
    if (end < info.offset || end - info.offset != info.bytes)
      fail(where, ": ", safetensors_name(*type), " ", info.shape, " takes ", info.bytes,
           " bytes, data_offsets are [", info.offset, ", ", end, ")");
    tensors_.push_back(std::move(info));
  }
  std::ranges::stable_sort(tensors_, {}, [](const Info& i) {
    return std::pair(i.offset, i.bytes);  // tensors of no bytes before the one that begins there
  });
  for (size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].name] = i;
}

// Each byte once: no holes, no overlaps, nothing after the last, nothing cut off.
void SafetensorsReader::check_cover(int64_t data_bytes) {
  int64_t at = 0;
  for (const Info& t : tensors_) {
    if (t.offset != at)
      fail("[safetensors] ", path_, ": tensor '", t.name, "' begins at byte ", t.offset,
           t.offset < at ? ", inside the one before it, which ends at "
                         : ", but the one before it ends at ",
           at);
    at += t.bytes;
    if (at > data_bytes)
      fail("[safetensors] ", path_, ": cut short: tensor '", t.name, "' ends at byte ", at,
           " of the data, the file has ", data_bytes);
  }
  if (at != data_bytes)
    fail("[safetensors] ", path_, ": ", data_bytes - at, " bytes after the last tensor");
}

void SafetensorsReader::read_bytes(int64_t offset, int64_t bytes, void* to,
                                   const std::string& what) const {
  char* p = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = ::pread(descriptor_, p, size_t(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      fail("[safetensors] ", path_, ": cannot read ", what, ": ",
           n < 0 ? std::strerror(errno) : "the file became shorter");
    p += n, offset += n, bytes -= n;
  }
}

const SafetensorsReader::Info& SafetensorsReader::info(const std::string& name) const {
  const auto i = index_.find(name);
  if (i == index_.end()) fail("[safetensors] ", path_, " has no tensor '", name, "'");
  return tensors_[i->second];
}

Tensor SafetensorsReader::read(const std::string& name) const {
  const Info& i = info(name);
  Tensor t = empty(i.shape, i.dtype);
  read_range(name, 0, i.shape.numel(), t.bytes());
  return t;
}

void SafetensorsReader::read_range(const std::string& name, int64_t begin, int64_t end,
                                   void* to) const {
  const Info& i = info(name);
  if (begin < 0 || begin > end || end > i.shape.numel())
    fail("[safetensors] ", path_, ": elements [", begin, ", ", end, ") of tensor '", name,
         "', which has ", i.shape.numel());
  const int64_t size = size_of(i.dtype);
  read_bytes(data_begin_ + i.offset + begin * size, (end - begin) * size, to,
             "tensor '" + name + "'");
}

// ---- writing

static std::string header_of(const std::string& path,
                             const std::vector<SafetensorsWriter::Entry>& entries,
                             const SafetensorsMetadata& metadata) {
  std::set<std::string> names = {"__metadata__"};
  std::string h = "{";
  const auto quoted = [&](const std::string& s) {
    try {
      return json(s).dump();
    } catch (const json::exception& e) {
      fail("[safetensors] ", path, ": a name or metadata is not UTF-8: ", e.what());
    }
  };
  if (!metadata.empty()) {
    h += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata)
      h += concat(h.back() == '{' ? "" : ",", quoted(key), ":", quoted(value));
    h += "}";
  }
  int64_t at = 0;
  for (const auto& e : entries) {
    if (!names.insert(e.name).second)
      fail("[safetensors] ", path, ": '", e.name, "' is reserved or comes twice");
    std::string shape;
    for (int64_t s : e.shape) {
      if (s < 0) fail("[safetensors] ", path, ": tensor '", e.name, "' has shape ", e.shape);
      shape += concat(shape.empty() ? "" : ",", s);
    }
    const int64_t end = at + e.shape.numel() * size_of(e.dtype);
    h += concat(h.size() == 1 ? "" : ",", quoted(e.name), ":{\"dtype\":\"",
                safetensors_name(e.dtype), "\",\"shape\":[", shape, "],\"data_offsets\":[", at, ",",
                end, "]}");
    at = end;
  }
  h += "}";
  h.resize((h.size() + 7) / 8 * 8, ' ');
  if (int64_t(h.size()) > kMaxHeader)
    fail("[safetensors] ", path, ": a header of ", h.size(), " bytes is above the limit of ",
         kMaxHeader);
  return h;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<Entry> entries,
                                     const SafetensorsMetadata& metadata)
    : file_(path), entries_(std::move(entries)) {
  const std::string header = header_of(path, entries_, metadata);
  const uint64_t length = header.size();
  file_.write(&length, 8);
  file_.write(header.data(), int64_t(length));
  data_begin_ = file_.bytes();
}

const SafetensorsWriter::Entry& SafetensorsWriter::current() const {
  if (at_ == entries_.size())
    fail("[safetensors] ", file_.path(), ": all ", entries_.size(), " tensors have been written");
  return entries_[at_];
}

void SafetensorsWriter::append(const Tensor& tensor) {
  const Entry& e = current();
  if (done_)
    fail("[safetensors] ", file_.path(), ": tensor '", e.name, "' was begun by parts, ", done_,
         " bytes of it have come");
  if (tensor.dtype() != e.dtype || !(tensor.sizes() == e.shape))
    fail("[safetensors] ", file_.path(), ": tensor '", e.name, "' should be ", e.dtype, " ",
         e.shape, ", got ", tensor.dtype(), " ", tensor.sizes());
  if (!tensor.device().is_cpu())
    fail("[safetensors] ", file_.path(), ": tensor '", e.name, "' is on ", tensor.device(),
         "; copy it to the cpu first");
  const Tensor dense = contiguous_raw(tensor);
  append_bytes(dense.bytes(), dense.nbytes());
}

void SafetensorsWriter::append_bytes(const void* data, int64_t bytes) {
  const Entry& e = current();
  const int64_t left = e.shape.numel() * size_of(e.dtype) - done_;
  if (bytes > left)
    fail("[safetensors] ", file_.path(), ": ", bytes, " more bytes for tensor '", e.name,
         "', which lacks ", left);
  file_.write(data, bytes);
  done_ += bytes;
  if (bytes == left) ++at_, done_ = 0;
}

FileSummary SafetensorsWriter::finish() {
  if (at_ < entries_.size())
    fail("[safetensors] ", file_.path(), ": ", at_, " of ", entries_.size(),
         " tensors have been written, the next is '", entries_[at_].name, "'");
  return file_.commit();
}

// ---- whole files

std::map<std::string, Tensor> load_safetensors(const std::string& path) {
  const SafetensorsReader file(path);
  std::map<std::string, Tensor> tensors;
  for (const auto& info : file.tensors()) tensors[info.name] = file.read(info.name);
  return tensors;
}

std::vector<SafetensorsWriter::Entry> in_file_order(std::vector<SafetensorsWriter::Entry> entries) {
  std::ranges::stable_sort(entries, std::greater{},
                           [](const auto& e) { return file_order(e.dtype); });
  return entries;
}

FileSummary save_safetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                             const SafetensorsMetadata& metadata) {
  std::vector<SafetensorsWriter::Entry> entries;
  for (const auto& [name, t] : tensors) entries.push_back({name, t.dtype(), t.sizes()});
  entries = in_file_order(std::move(entries));
  SafetensorsWriter writer(path, entries, metadata);
  for (const auto& e : entries) writer.append(tensors.at(e.name));
  return writer.finish();
}

}  // namespace sherd
