#include "distributed/objects.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "distributed/agree.h"

namespace sherd::dist {
namespace {

Tensor bytes_of(const std::string& s) {
  const Tensor t = empty({int64_t(s.size())}, kUInt8);
  if (!s.empty()) std::memcpy(t.bytes(), s.data(), s.size());
  return t;
}
std::string string_of(const Tensor& t) { return {t.bytes(), size_t(t.numel())}; }

std::string to_bytes(const nlohmann::json& j) {
  std::string s;
  nlohmann::json::to_cbor(j, s);
  return s;
}
std::vector<std::string> to_bytes(const std::vector<nlohmann::json>& list) {
  std::vector<std::string> all;
  for (auto& j : list) all.push_back(to_bytes(j));
  return all;
}
void from_bytes(const std::vector<std::string>& all, std::vector<nlohmann::json>& list) {
  for (size_t i = 0; i < all.size(); ++i) list[i] = nlohmann::json::from_cbor(all[i]);
}

// What a call is of, and its options without what it does itself.
class Call {
 public:
  Call(const char* op, const CallOptions& options) : op_(op), options_(options) {
    if (!options.group) options_.group = default_group();
    if (options.async) refuse("waits for its result: options.async is not possible");
    if (options.label.empty()) options_.label = op;
  }
  template <class... A>
  [[noreturn]] void refuse(const A&... text) const {
    const std::string all = concat("[", op_, "] ", text...);
    options_.group->refused(all);
    throw Error(all);
  }
  void check_count(const char* what, size_t count, bool here) const {
    const size_t expected = here ? size_t(options_.group->size()) : 0;
    if (count != expected)
      refuse("got ", count, " ", what, ", should be ", expected,
             here ? ": one a rank" : ": the root alone has them");
  }
  const CallOptions& options() const { return options_; }
  int rank() const { return options_.group->rank(); }
  int size() const { return options_.group->size(); }

 private:
  const char* op_;
  CallOptions options_;
};

}  // namespace

void all_gather_object(std::vector<std::string>& objects, const std::string& object,
                       const CallOptions& options) {
  const Call call("all_gather_object", options);
  call.check_count("places for objects", objects.size(), true);
  const CallOptions& o = call.options();
  objects = all_gather_text(o.group, object, {.timeout = o.timeout, .label = o.label});
}

void gather_object(const std::string& object, std::vector<std::string>& objects, int root,
                   const CallOptions& options) {
  const Call call("gather_object", options);
  const bool here = call.rank() == root;
  call.check_count("places for objects", objects.size(), here);
  std::vector<Tensor> sizes, rooms;
  for (int r = 0; here && r < call.size(); ++r) sizes.push_back(empty({1}, kInt64));
  gather(sizes, tensor<int64_t>({int64_t(object.size())}), root, call.options());
  for (const Tensor& size : sizes) rooms.push_back(empty({size.item<int64_t>()}, kUInt8));
  gather(rooms, bytes_of(object), root, call.options());
  for (size_t r = 0; r < rooms.size(); ++r) objects[r] = string_of(rooms[r]);
}

void broadcast_object_list(std::vector<std::string>& objects, int root,
                           const CallOptions& options) {
  const Call call("broadcast_object_list", options);
  if (objects.empty()) call.refuse("got no objects, should be one at least, as many on all ranks");
  const Tensor sizes = empty({int64_t(objects.size())}, kInt64);
  std::string all;
  for (size_t i = 0; i < objects.size(); ++i) {
    sizes.data<int64_t>()[i] = int64_t(objects[i].size());
    if (call.rank() == root) all += objects[i];
  }
  broadcast(sizes, root, call.options());
  if (call.rank() != root)
    for (int64_t i = 0; i < sizes.numel(); ++i) all.resize(all.size() + sizes.data<int64_t>()[i]);
  const Tensor bytes = bytes_of(all);
  broadcast(bytes, root, call.options());
  const char* at = bytes.bytes();
  for (size_t i = 0; i < objects.size(); ++i) {
    const auto n = size_t(sizes.data<int64_t>()[i]);
    objects[i].assign(n ? at : "", n);
    at += n;
  }
}

void scatter_object_list(std::vector<std::string>& output, const std::vector<std::string>& inputs,
                         int root, const CallOptions& options) {
  const Call call("scatter_object_list", options);
  if (output.empty()) call.refuse("got an output list of no elements, should be one at least");
  call.check_count("inputs", inputs.size(), call.rank() == root);
  std::vector<Tensor> sizes, bytes;
  for (auto& s : inputs) {
    sizes.push_back(tensor<int64_t>({int64_t(s.size())}));
    bytes.push_back(bytes_of(s));
  }
  const Tensor size = empty({1}, kInt64);
  scatter(size, sizes, root, call.options());
  const Tensor mine = empty({size.item<int64_t>()}, kUInt8);
  scatter(mine, bytes, root, call.options());
  output[0] = string_of(mine);
}

void all_gather_object(std::vector<nlohmann::json>& objects, const nlohmann::json& object,
                       const CallOptions& options) {
  std::vector<std::string> all(objects.size());
  all_gather_object(all, to_bytes(object), options);
  from_bytes(all, objects);
}
void gather_object(const nlohmann::json& object, std::vector<nlohmann::json>& objects, int root,
                   const CallOptions& options) {
  std::vector<std::string> all(objects.size());
  gather_object(to_bytes(object), all, root, options);
  from_bytes(all, objects);
}
void broadcast_object_list(std::vector<nlohmann::json>& objects, int root,
                           const CallOptions& options) {
  std::vector<std::string> all = to_bytes(objects);
  broadcast_object_list(all, root, options);
  from_bytes(all, objects);
}
void scatter_object_list(std::vector<nlohmann::json>& output,
                         const std::vector<nlohmann::json>& inputs, int root,
                         const CallOptions& options) {
  std::vector<std::string> mine(output.size());
  scatter_object_list(mine, to_bytes(inputs), root, options);
  mine.resize(1);
  from_bytes(mine, output);
}

}  // namespace sherd::dist
