#include "distributed/checkpoint/shard_index.h"

#include <algorithm>

#include "core/atomic_file.h"
#include "core/error.h"
#include "core/safetensors.h"
#include "distributed/hex.h"

namespace sherd::dist {
namespace {

using nlohmann::json;
constexpr int kFormat = 1;

uint64_t checksum_from(const std::string& digits) {
  if (const auto number = number_from_hex(digits)) return *number;
  fail("[checkpoint] the index has '", digits, "' for a checksum");
}

int64_t to_size(const json& v, const std::string& where) {
  if (!v.is_number_integer() ||
      (v.is_number_unsigned() && v.get<uint64_t>() > uint64_t(INT64_MAX)) || v.get<int64_t>() < 0)
    fail("[checkpoint] the index has ", v.dump(), " where ", where,
         " should have a whole number of at least 0");
  return v.get<int64_t>();
}

}  // namespace

const ShardIndex::TensorInfo& ShardIndex::tensor(const std::string& name) const {
  const auto it = tensors.find(name);
  if (it == tensors.end()) fail("[checkpoint] there is no tensor '", name, "' in the checkpoint");
  return it->second;
}

std::vector<ShardIndex::Read> ShardIndex::reads(const std::string& name, int64_t begin,
                                                int64_t end) const {
  const TensorInfo& t = tensor(name);
  if (begin < 0 || begin > end || end > t.shape.numel())
    fail("[checkpoint] elements [", begin, ", ", end, ") of '", name, "', which has ",
         t.shape.numel());
  const int64_t size = size_of(t.dtype);
  std::vector<Read> result;
  for (const Piece& p : t.pieces) {
    if (begin >= end || p.begin >= end) break;
    const int64_t to = std::min(p.end, end);
    if (to <= begin) continue;
    const int64_t offset = p.offset + (begin - p.begin) * size, bytes = (to - begin) * size;
    Read* last = result.empty() ? nullptr : &result.back();
    if (last && last->file == p.file && last->offset + last->bytes == offset)
      last->bytes += bytes, last->end = to;
    else
      result.push_back({p.file, offset, bytes, begin, to});
    begin = to;
  }
  return result;
}

void ShardIndex::finish() {
  for (auto& [name, t] : tensors) {
    const int64_t n = t.shape.numel(), size = size_of(t.dtype);
    std::ranges::stable_sort(t.pieces, {}, &Piece::begin);
    int64_t at = 0;
    for (const Piece& p : t.pieces) {
      if (p.begin > at) break;
      at = std::max(at, p.end);
    }
    if (at < n)
      fail("[checkpoint] element ", at, " of '", name, "' (shape ", t.shape,
           ") is in no piece: every rank must give what it holds");
    for (const Piece& p : t.pieces) {
      if (p.begin < 0 || p.end < p.begin || p.end > n)
        fail("[checkpoint] '", name, "' of ", n, " elements has a piece [", p.begin, ", ", p.end,
             ")");
      if (p.file < 0 || p.file >= int(files.size()))
        fail("[checkpoint] '", name, "' is in file ", p.file, " of ", files.size());
      const int64_t bytes = (p.end - p.begin) * size;
      if (p.offset < 0 || p.offset > files[p.file].bytes || bytes > files[p.file].bytes - p.offset)
        fail("[checkpoint] '", name, "' should have ", bytes, " bytes at ", p.offset, " of ",
             files[p.file].name, ", which has ", files[p.file].bytes);
    }
  }
}

json ShardIndex::to_json() const {
  json result = {{"format", kFormat},
                 {"checksum_block", kChecksumBlock},
                 {"files", json::array()},
                 {"tensors", json::object()}};
  for (const File& f : files) {
    json checksums = json::array();
    for (uint64_t c : f.checksums) checksums.push_back(hex_of(c));
    result["files"].push_back({{"name", f.name}, {"bytes", f.bytes}, {"xxh3", checksums}});
  }
  for (auto& [name, t] : tensors) {
    json pieces = json::array();
    for (const Piece& p : t.pieces)
      pieces.push_back({{"begin", p.begin},
                        {"end", p.end},
                        {"file", files.at(size_t(p.file)).name},
                        {"offset", p.offset},
                        {"bytes", (p.end - p.begin) * size_of(t.dtype)}});
    result["tensors"][name] = {{"dtype", safetensors_name(t.dtype)},
                               {"shape", std::vector<int64_t>(t.shape.begin(), t.shape.end())},
                               {"pieces", pieces}};
  }
  return result;
}

ShardIndex ShardIndex::from_json(const json& j) {
  try {
    if (j.at("format") != kFormat)
      fail("[checkpoint] the index has format ", j.at("format").dump(), "; this version reads ",
           kFormat);
    if (j.at("checksum_block") != kChecksumBlock)
      fail("[checkpoint] the index has checksums of blocks of ", j.at("checksum_block").dump(),
           " bytes, not ", kChecksumBlock);
    ShardIndex index;
    std::map<std::string, int> by_name;
    for (const json& f : j.at("files")) {
      File file{.name = f.at("name").get<std::string>(), .bytes = to_size(f.at("bytes"), "a file")};
      if (file.name.empty() || file.name[0] == '.' || file.name.find('/') != std::string::npos)
        fail("[checkpoint] '", file.name, "' cannot be the name of a checkpoint's file");
      for (const json& c : f.at("xxh3"))
        file.checksums.push_back(checksum_from(c.get<std::string>()));
      const int64_t blocks = file.bytes / kChecksumBlock + (file.bytes % kChecksumBlock != 0);
      if (int64_t(file.checksums.size()) != blocks)
        fail("[checkpoint] the index has ", file.checksums.size(), " checksums of ", file.name,
             ", which has ", blocks, " blocks");
      if (!by_name.emplace(file.name, int(index.files.size())).second)
        fail("[checkpoint] the index has the file ", file.name, " twice");
      index.files.push_back(std::move(file));
    }
    for (const auto& [name, t] : j.at("tensors").items()) {
      const auto dtype = safetensors_dtype(t.at("dtype").get<std::string>());
      if (!dtype) fail("[checkpoint] '", name, "' has the dtype ", t.at("dtype").dump());
      TensorInfo info{.dtype = *dtype, .shape = {}, .pieces = {}};
      int64_t bytes = size_of(*dtype);
      for (const json& s : t.at("shape")) {
        info.shape.push(to_size(s, concat("the shape of '", name, "'")));
        if (__builtin_mul_overflow(bytes, std::max<int64_t>(info.shape[info.shape.n - 1], 1),
                                   &bytes))
          fail("[checkpoint] '", name, "' is too large: shape ", info.shape);
      }
      for (const json& p : t.at("pieces")) {
        const auto file = by_name.find(p.at("file").get<std::string>());
        if (file == by_name.end())
          fail("[checkpoint] '", name, "' is in ", p.at("file").dump(),
               ", which is not among the files");
        info.pieces.push_back({to_size(p.at("begin"), name), to_size(p.at("end"), name),
                               file->second, to_size(p.at("offset"), name)});
      }
      index.tensors.emplace(name, std::move(info));
    }
    index.finish();
    return index;
  } catch (const json::exception& e) {
    fail("[checkpoint] the index is damaged: ", e.what());
  }
}

std::vector<std::pair<int64_t, int64_t>> runs_of_box(const Dims& shape, const Dims& start,
                                                     const Dims& size) {
  if (start.n != shape.n || size.n != shape.n)
    fail("[runs_of_box] a box of corner ", start, " and sizes ", size, " in shape ", shape);
  for (int i = 0; i < shape.n; ++i)
    if (start[i] < 0 || size[i] < 0 || start[i] > shape[i] || size[i] > shape[i] - start[i])
      fail("[runs_of_box] a box of corner ", start, " and sizes ", size, " does not lie in shape ",
           shape);
  std::vector<std::pair<int64_t, int64_t>> runs;
  if (size.numel() == 0) return runs;
  const int64_t width = shape.n ? size[shape.n - 1] : 1;
  const Dims strides = contiguous_strides(shape);
  for (int64_t row = 0; row < size.numel() / width; ++row) {
    int64_t at = shape.n ? start[shape.n - 1] : 0, rest = row;
    for (int i = shape.n - 2; i >= 0; --i) {
      at += (start[i] + rest % size[i]) * strides[i];
      rest /= size[i];
    }
    if (!runs.empty() && runs.back().second == at)
      runs.back().second = at + width;
    else
      runs.emplace_back(at, at + width);
  }
  return runs;
}

}  // namespace sherd::dist
