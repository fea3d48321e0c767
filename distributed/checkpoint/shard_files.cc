#include "distributed/checkpoint/shard_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>

#include "core/safetensors.h"
#include "distributed/agree.h"
#include "distributed/fd.h"
#include "distributed/hex.h"

namespace sherd::dist {
namespace {

using nlohmann::json;

std::string file_of_rank(int rank, int world) {
  char name[64];
  std::snprintf(name, sizeof name, "rank-%05d-of-%05d.safetensors", rank, world);
  return name;
}

json describe(const LocalState& s) {
  json pieces = json::array();
  for (const ShardPiece& p : s.pieces) {
    if (p.values.numel() != p.end - p.begin || !p.values.is_contiguous() ||
        !p.values.device().is_cpu())
      fail("[checkpoint] the piece [", p.begin, ", ", p.end, ") of '", p.name,
           "' has values of shape ", p.values.sizes(), " on ", p.values.device(),
           ": as many elements, contiguous and on the cpu, are needed");
    const std::string_view bytes(p.values.numel() ? p.values.bytes() : "",
                                 size_t(p.values.nbytes()));
    pieces.push_back({p.name, safetensors_name(p.values.dtype()),
                      std::vector<int64_t>(p.shape.begin(), p.shape.end()), p.begin, p.end,
                      p.shared || p.values.numel() == 1 ? hex_of(bytes) : "", p.shared});
  }
  return {{"pieces", pieces}, {"own", s.own}, {"common", s.common}};
}

struct PlannedPiece {
  std::string name;
  DType dtype;
  Dims shape;
  int64_t begin, end;
  int writer;
  int64_t bytes() const { return (end - begin) * size_of(dtype); }
  bool is_whole() const { return begin == 0 && end == shape.numel(); }
  // In the file: the tensor's own name if it is whole.
  std::string key() const { return is_whole() ? name : concat(name, "[", begin, ":", end, "]"); }
  Dims stored_shape() const { return is_whole() ? shape : Dims{end - begin}; }
};

struct Plan {
  std::vector<PlannedPiece> pieces;
  // In the order of a rank's file: wide elements first, so that all are aligned.
  std::vector<const PlannedPiece*> of_rank(int rank) const {
    std::vector<const PlannedPiece*> mine;
    for (auto& p : pieces)
      if (p.writer == rank) mine.push_back(&p);
    std::ranges::stable_sort(mine, std::greater{}, [](auto* p) { return size_of(p->dtype); });
    return mine;
  }
};

std::string list_of(const std::vector<int>& ranks) {
  std::string text;
  for (int r : ranks) text += concat(text.empty() ? "" : ", ", r);
  return text;
}

// See [Note: what is written once]. Errors are the same on all ranks.
Plan make_plan(const std::vector<json>& ranks) {
  struct Held {
    PlannedPiece piece;
    std::vector<int> holders;
    std::string value;
    bool shared;
  };
  std::vector<Held> held;
  std::map<std::string, size_t> first;  // of each tensor
  std::map<std::tuple<std::string, int64_t, int64_t>, size_t> places;
  for (int r = 0; r < int(ranks.size()); ++r)
    for (const json& j : ranks[size_t(r)].at("pieces")) {
      PlannedPiece p{j[0], *safetensors_dtype(j[1]), j[2].get<std::vector<int64_t>>(), j[3], j[4],
                     r};
      const std::string value = j[5];
      if (const auto [known, is_first] = first.try_emplace(p.name, held.size()); !is_first) {
        const PlannedPiece& like = held[known->second].piece;
        if (like.dtype != p.dtype || !(like.shape == p.shape))
          fail("[checkpoint] ranks disagree about '", p.name, "': ", like.dtype, " ", like.shape,
               " on rank ", like.writer, ", ", p.dtype, " ", p.shape, " on rank ", r);
      }
      const auto [it, is_new] = places.try_emplace(std::tuple(p.name, p.begin, p.end), held.size());
      if (is_new) {
        held.push_back({std::move(p), {r}, value, j[6]});
        continue;
      }
      Held& h = held[it->second];
      if (h.value != value)
        fail("[checkpoint] ranks disagree about the value of '", p.name, "': rank ", h.holders[0],
             " and rank ", r);
      if (h.holders.back() == r)
        fail("[checkpoint] rank ", r, " gives '", p.name, "' [", p.begin, ", ", p.end, ") twice");
      h.holders.push_back(r);
    }
  std::string missing;
  for (const Held& h : held)
    if (h.shared && h.holders.size() < ranks.size())
      missing += concat("\n  ", h.piece.name, ": only on ranks ", list_of(h.holders));
  if (!missing.empty())
    fail("[checkpoint] not all of the ", ranks.size(), " ranks have the same state:", missing);
  Plan plan;
  std::vector<int64_t> load(ranks.size());
  for (Held& h : held) {
    const bool needed = h.piece.begin < h.piece.end || h.piece.shape.numel() == 0;
    if (!needed) continue;
    h.piece.writer = *std::ranges::min_element(h.holders, [&](int a, int b) {
      return std::pair(load[size_t(a)], a) < std::pair(load[size_t(b)], b);
    });
    load[size_t(h.piece.writer)] += h.piece.bytes();
    plan.pieces.push_back(std::move(h.piece));
  }
  return plan;
}

// This rank's file; what rank 0 needs to know of it.
json write_file(const std::string& path, const LocalState& s,
                const std::vector<const PlannedPiece*>& mine) {
  std::map<std::tuple<std::string, int64_t, int64_t>, const Tensor*> values;
  for (const ShardPiece& p : s.pieces) values[{p.name, p.begin, p.end}] = &p.values;
  std::vector<SafetensorsWriter::Entry> entries;
  for (auto* p : mine) entries.push_back({p->key(), p->dtype, p->stored_shape()});
  SafetensorsWriter writer(path, std::move(entries), {{"format", "sherd-shard"}});
  for (auto* p : mine) {
    const Tensor& t = *values.at({p->name, p->begin, p->end});
    writer.append_bytes(t.numel() ? t.bytes() : nullptr, t.nbytes());
  }
  const FileSummary summary = writer.finish();
  return {{"bytes", summary.bytes},
          {"checksum", summary.checksum},
          {"data_begin", writer.data_begin()},
          {"blocks", writer.block_checksums()}};
}

ShardIndex make_index(const Plan& plan, const std::vector<json>& files, const LocalState& s) {
  ShardIndex index;
  for (int r = 0; r < int(files.size()); ++r) {
    if (files[size_t(r)].is_null()) continue;
    const json& f = files[size_t(r)];
    const int number = int(index.files.size());
    index.files.push_back({file_of_rank(r, int(files.size())), f.at("bytes"),
                           f.at("blocks").get<std::vector<uint64_t>>()});
    int64_t at = f.at("data_begin");
    for (auto* p : plan.of_rank(r)) {
      auto& t = index.tensors.try_emplace(p->name, ShardIndex::TensorInfo{p->dtype, p->shape, {}})
                    .first->second;
      t.pieces.push_back({p->begin, p->end, number, at});
      at += p->bytes();
    }
  }
  for (auto& [name, original] : s.aliases) index.tensors[name] = index.tensor(original);
  index.finish();
  return index;
}

}  // namespace

std::string save_shards(const Group& group, const std::string& folder, int64_t step,
                        const LocalState& mine, const CheckpointOptions& options) {
  const int world = size_of_group(group), rank = rank_in(group);
  // Each round: what a rank has to say, or why it cannot.
  const auto round = [&](const std::function<std::string()>& f) {
    std::string text;
    all_or_none(group, [&] { text = f(); });
    return all_gather_text(group, text);
  };
  std::vector<json> described;
  for (const std::string& text : round([&] { return describe(mine).dump(); }))
    described.push_back(json::parse(text));
  const Plan plan = make_plan(described);

  std::unique_ptr<CheckpointWriter> writer;
  const std::string name = file_of_rank(rank, world);
  const std::string hidden = round([&] {
    if (rank != 0) return std::string();
    writer = std::make_unique<CheckpointWriter>(folder, step, options);
    const std::string path = writer->path(name);
    return path.substr(0, path.size() - name.size());
  })[0];

  const auto written = round([&] {
    const auto todo = plan.of_rank(rank);
    if (options.on_stage) options.on_stage("write");
    return (todo.empty() ? json() : write_file(hidden + name, mine, todo)).dump();
  });

  return round([&] {
    if (rank != 0) return std::string();
    std::vector<json> files;
    for (auto& text : written) files.push_back(json::parse(text));
    for (int r = 0; r < world; ++r)
      if (const json& f = files[size_t(r)]; !f.is_null())
        writer->add(file_of_rank(r, world), {f.at("bytes"), f.at("checksum")});
    const std::string index = make_index(plan, files, mine).to_json().dump() + "\n";
    AtomicFile file(writer->path(kShardIndex));
    file.write(index.data(), int64_t(index.size()));
    writer->add(kShardIndex, file.commit());
    json state = {{"common", mine.common}, {"ranks", json::array()}};
    for (auto& d : described) state["ranks"].push_back(d.at("own"));
    return writer->commit(state);
  })[0];
}

// ---- reading

namespace {

ShardIndex read_index(const Checkpoint& checkpoint) {
  const std::string path = checkpoint.file(kShardIndex), text = read_file(path);
  const FileSummary found{int64_t(text.size()), checksum_of(text.data(), int64_t(text.size()))};
  if (found != checkpoint.files.at(kShardIndex))
    fail("[checkpoint] ", path, " was changed: its checksum is another");
  try {
    return ShardIndex::from_json(json::parse(text));
  } catch (const json::exception& e) {
    fail("[checkpoint] ", path, " is damaged: ", e.what());
  }
}

ShardIndex index_of_whole_files(const Checkpoint& checkpoint) {
  ShardIndex index;
  for (auto& [name, prefix] : {std::pair(kModelFile, "model."), {kOptimizerFile, "optimizer."}}) {
    if (!checkpoint.files.contains(name)) continue;
    const SafetensorsReader file(checkpoint.file(name));
    const int number = int(index.files.size());
    index.files.push_back({name, checkpoint.files.at(name).bytes});
    for (auto& t : file.tensors())
      index.tensors[prefix + t.name] = {
          t.dtype, t.shape, {{0, t.shape.numel(), number, file.data_begin() + t.offset}}};
  }
  if (index.files.empty())
    fail("[checkpoint] ", checkpoint.path, " has neither ", kShardIndex, " nor ", kModelFile);
  index.finish();
  return index;
}

}  // namespace

ShardReader::ShardReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {
  try {
    index_ = checkpoint.files.contains(kShardIndex) ? read_index(checkpoint)
                                                    : index_of_whole_files(checkpoint);
  } catch (const Error& e) {
    throw DamagedCheckpoint(e.what());
  }
}

void ShardReader::open(int file) {
  if (file == open_file_) return;
  const std::string path = checkpoint_.path + "/" + index_.files.at(size_t(file)).name;
  descriptor_ = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  open_file_ = descriptor_ ? file : -1;
  if (!descriptor_)
    throw DamagedCheckpoint(concat("[checkpoint] ", path, ": ", std::strerror(errno)));
}

void ShardReader::read_bytes(int file, int64_t offset, int64_t bytes, void* to) {
  open(file);
  char* p = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = ::pread(descriptor_.fd(), p, size_t(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw DamagedCheckpoint(concat("[checkpoint] ", checkpoint_.path, "/",
                                     index_.files[size_t(file)].name, " at byte ", offset, ": ",
                                     n < 0 ? std::strerror(errno) : "the file ends there"));
    p += n, offset += n, bytes -= n;
  }
}

void ShardReader::verify(const std::vector<ShardIndex::Read>& reads) {
  std::set<std::pair<int, int64_t>> blocks;
  for (auto& r : reads)
    for (int64_t b = r.offset / kChecksumBlock; b * kChecksumBlock < r.offset + r.bytes; ++b)
      blocks.insert({r.file, b});
  std::vector<char> block(kChecksumBlock);
  for (auto [file, b] : blocks) {
    const ShardIndex::File& f = index_.files[size_t(file)];
    if (f.checksums.empty()) continue;
    const int64_t offset = b * kChecksumBlock, bytes = std::min(kChecksumBlock, f.bytes - offset);
    read_bytes(file, offset, bytes, block.data());
    if (checksum_of(block.data(), bytes) != f.checksums[size_t(b)])
      throw DamagedCheckpoint(concat("[checkpoint] ", checkpoint_.path, "/", f.name,
                                     " was changed: the ", bytes, " bytes from ", offset,
                                     " on have another checksum"));
  }
}

void ShardReader::read(const std::string& name, int64_t begin, int64_t end, void* to) {
  const int64_t size = size_of(index_.tensor(name).dtype);
  for (const ShardIndex::Read& r : index_.reads(name, begin, end)) {
    read_bytes(r.file, r.offset, r.bytes, static_cast<char*>(to) + (r.begin - begin) * size);
    bytes_read_ += r.bytes;
  }
}

}  // namespace sherd::dist
