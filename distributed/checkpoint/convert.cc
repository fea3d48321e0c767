#include "distributed/checkpoint/convert.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <set>

#include "core/safetensors.h"
#include "distributed/checkpoint/shard_files.h"

namespace sherd::dist {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kChunk = int64_t(1) << 24;  // bytes at a time

std::vector<SafetensorsWriter::Entry> entries_of(const ShardIndex& index,
                                                 const std::string& prefix) {
  std::vector<SafetensorsWriter::Entry> entries;
  for (auto& [name, t] : index.tensors)
    if (name.starts_with(prefix)) entries.push_back({name.substr(prefix.size()), t.dtype, t.shape});
  return entries;
}

void write(ShardReader& reader, const std::string& prefix, const std::string& path,
           std::vector<SafetensorsWriter::Entry> entries) {
  entries = in_file_order(std::move(entries));
  SafetensorsWriter writer(path, entries, {{"format", "pt"}});
  std::vector<char> bytes;
  for (auto& e : entries) {
    const std::string name = prefix + e.name;
    const int64_t n = e.shape.numel(), size = size_of(e.dtype);
    if (n == 0) writer.append_bytes(nullptr, 0);
    for (int64_t begin = 0; begin < n; begin += kChunk / size) {
      const int64_t end = std::min(n, begin + kChunk / size);
      reader.verify(reader.index().reads(name, begin, end));
      bytes.resize(size_t((end - begin) * size));
      reader.read(name, begin, end, bytes.data());
      writer.append_bytes(bytes.data(), int64_t(bytes.size()));
    }
  }
  writer.finish();
}

std::string numbered(const std::string& path, int number, int of) {
  const std::string stem = path.substr(0, path.size() - std::string(".safetensors").size());
  char text[64];
  std::snprintf(text, sizeof text, "-%05d-of-%05d.safetensors", number, of);
  return stem + text;
}

// In the order of names, in files of about the same size.
void write_several(ShardReader& reader, const std::string& path, int files) {
  const auto entries = entries_of(reader.index(), "model.");
  int64_t total = 0;
  for (auto& e : entries) total += e.shape.numel() * size_of(e.dtype);
  // By bytes, but so that each file has a tensor.
  std::vector<std::vector<SafetensorsWriter::Entry>> parts(static_cast<size_t>(files));
  int64_t before = 0, part = 0, left = int64_t(entries.size());
  for (auto& e : entries) {
    const bool is_begun = !parts[size_t(part)].empty(), others_need_it = left < files - part;
    if (is_begun && (others_need_it || (total && before * files / total > part)) &&
        part + 1 < files)
      ++part;
    parts[size_t(part)].push_back(e);
    before += e.shape.numel() * size_of(e.dtype);
    --left;
  }
  json map = json::object();
  for (int i = 0; i < files; ++i) {
    const std::string file = numbered(path, i + 1, files);
    for (auto& e : parts[size_t(i)]) map[e.name] = fs::path(file).filename();
    write(reader, "model.", file, std::move(parts[size_t(i)]));
  }
  const std::string text =
      json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n";
  AtomicFile index(path + ".index.json");
  index.write(text.data(), int64_t(text.size()));
  index.commit();
}

void add_file(const std::string& path, const std::string& prefix, LocalState& s,
              const std::function<bool(const std::string& name)>& wanted = nullptr) {
  const SafetensorsReader file(path);
  for (auto& t : file.tensors())
    if (!wanted || wanted(t.name))
      s.pieces.push_back({prefix + t.name, t.shape, 0, t.shape.numel(), file.read(t.name)});
}

// Else the one given for the other would only be noticed when the checkpoint is loaded.
void check_kind(const std::string& path, bool of_optimizer) {
  const SafetensorsReader file(path);
  for (auto& t : file.tensors())
    if (of_optimizer ? !t.name.starts_with("state.") && !t.name.starts_with("param_groups.")
                     : t.name.starts_with("param_groups."))
      fail("[to_sharded] ", path,
           of_optimizer ? " is no optimizer's file" : " is an optimizer's file", ": it holds '",
           t.name, "'");
}

void add_model(const std::string& path, LocalState& s) {
  if (!path.ends_with(".index.json")) check_kind(path, false);
  if (!path.ends_with(".index.json")) return add_file(path, "model.", s);
  std::map<std::string, std::string> map;
  try {
    map = json::parse(read_file(path)).at("weight_map").get<std::map<std::string, std::string>>();
  } catch (const json::exception& e) {
    fail("[to_sharded] ", path, " has no map of weights: ", e.what());
  }
  std::set<std::string> files;
  for (auto& [name, file] : map) files.insert(file);
  for (auto& file : files)
    add_file(fs::path(path).parent_path() / file, "model.", s, [&](const std::string& name) {
      const auto it = map.find(name);
      return it != map.end() && it->second == file;
    });
  for (auto& [name, file] : map)
    if (std::ranges::none_of(s.pieces, [&](auto& p) { return p.name == "model." + name; }))
      fail("[to_sharded] ", path, " says that '", name, "' is in ", file, ", where it is not");
}

}  // namespace

void to_full(const std::string& checkpoint, const std::string& model,
             const ToFullOptions& options) {
  for (auto& path : {model, options.optimizer})
    if (!path.empty() && !path.ends_with(".safetensors"))
      fail("[to_full] ", path, " should end with .safetensors");
  if (options.files < 1) fail("[to_full] files must be at least 1, got ", options.files);
  bool is_one_file = options.optimizer == model;
  for (int i = 1; options.files > 1 && i <= options.files; ++i)
    is_one_file |= options.optimizer == numbered(model, i, options.files);
  if (is_one_file)
    fail("[to_full] model and optimizer would be written to the same file ", options.optimizer);
  std::vector<std::string> made = {model, model + ".index.json", options.optimizer};
  for (int i = 1; options.files > 1 && i <= options.files; ++i)
    made.push_back(numbered(model, i, options.files));
  for (const std::string& path : made) need_outside_of_checkpoints(path);
  const Checkpoint sizes = open_checkpoint(checkpoint, Verify::kSizes);
  ShardReader reader(sizes.files.contains(kShardIndex) ? sizes : open_checkpoint(checkpoint));
  auto weights = entries_of(reader.index(), "model.");
  if (weights.empty()) fail("[to_full] ", checkpoint, " holds no model");
  if (options.files > int64_t(weights.size()))
    fail("[to_full] ", checkpoint, " holds ", weights.size(), " tensors: they cannot be cut into ",
         options.files, " files");
  auto moments = entries_of(reader.index(), "optimizer.");
  if (!options.optimizer.empty() && moments.empty())
    fail("[to_full] ", checkpoint, " holds no optimizer's state");
  if (options.files > 1)
    write_several(reader, model, options.files);
  else
    write(reader, "model.", model, std::move(weights));
  if (!options.optimizer.empty())
    write(reader, "optimizer.", options.optimizer, std::move(moments));
}

std::string to_sharded(const std::string& model, const std::string& optimizer,
                       const std::string& folder, int64_t step) {
  need_outside_of_checkpoints(folder + "/" + checkpoint_name(step));
  LocalState s;
  add_model(model, s);
  if (!optimizer.empty()) {
    check_kind(optimizer, true);
    add_file(optimizer, "optimizer.", s);
  }
  s.common = {{"step", step}, {"user", nullptr}};
  s.own = json::object();
  return save_shards(nullptr, folder, step, s);
}

}  // namespace sherd::dist
