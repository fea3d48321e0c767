// The collectives of MeshProcessGroup: what is checked, what each rank sends to whom, and where it
// goes.
#include <cstring>
#include <numeric>

#include "distributed/copy_bytes.h"
#include "distributed/mesh_process_group.h"
#include "distributed/outputs.h"
#include "distributed/tree_sum.h"

namespace sherd::dist {
namespace {

using Part = Exchange::Part;
using Parts = Exchange::Parts;
using PartsOfRanks = Exchange::PartsOfRanks;

// A tensor's elements, in order, in one run of bytes.
Part part_of(const Tensor& x) { return {x.bytes(), x.numel(), x.dtype()}; }

// What an operation reads: x, or a dense copy that lives until its end.
Tensor dense(const Tensor& x, Exchange& exchange) {
  Tensor y = contiguous_raw(x);
  exchange.hold(y.storage());
  return y;
}

// What an operation writes: x, or a dense stand-in; finish() brings it to x.
class Output {
 public:
  Output(const Tensor& x, Exchange& exchange, bool filled = false) : x_(x), y_(x) {
    if (x.is_contiguous()) return;
    y_ = filled ? contiguous_raw(x) : empty(x.sizes(), x.dtype());
    exchange.hold(y_.storage());
  }
  Part part() const { return part_of(y_); }
  void finish() const {
    if (!y_.is_same(x_)) copy_raw(x_, y_);
  }

 private:
  Tensor x_, y_;
};

void copy_part(const Part& to, const Part& from) {
  const bool apart = to.data + to.bytes() <= from.data || from.data + from.bytes() <= to.data;
  if (apart)
    copy_bytes(to.data, from.data, to.bytes(), to.bytes() >= kStreamBytes);
  else if (to.data != from.data)
    std::memmove(to.data, from.data, to.bytes());
}

void check_tensor(const char* op, const char* what, const Tensor& x) {
  if (!x.defined()) fail("[", op, "] ", what, " is an undefined tensor");
  if (!x.device().is_cpu())
    fail("[", op, "] ", what, " is on ", x.device(), ", and this group moves tensors of the cpu");
}

void check_list(const char* op, const char* what, const std::vector<Tensor>& list, int size,
                DType dtype) {
  if (int(list.size()) != size)
    fail("[", op, "] got ", list.size(), " ", what, ", should be ", size, ": one a rank");
  for (int i = 0; i < size; ++i) {
    check_tensor(op, concat(what, "[", i, "]").c_str(), list[i]);
    if (list[i].dtype() != dtype)
      fail("[", op, "] ", what, "[", i, "] is ", list[i].dtype(), ", should be ", dtype,
           " as the others");
  }
}

void check_pieces(const char* op, const std::vector<Tensor>& full,
                  const std::vector<Tensor>& pieces, int size) {
  if (full.empty() || full.size() != pieces.size())
    fail("[", op, "] got ", full.size(), " full tensors and ", pieces.size(),
         " pieces, should be as many of one as of the other, and one at least");
  for (size_t i = 0; i < full.size(); ++i) {
    check_tensor(op, concat("full[", i, "]").c_str(), full[i]);
    check_tensor(op, concat("pieces[", i, "]").c_str(), pieces[i]);
    if (full[i].dtype() != pieces[i].dtype() || !full[i].is_contiguous() ||
        !pieces[i].is_contiguous() || full[i].numel() != size * pieces[i].numel())
      fail("[", op, "] full[", i, "] is ", full[i].dtype(), " ", full[i].sizes(), " and pieces[", i,
           "] is ", pieces[i].dtype(), " ", pieces[i].sizes(),
           ": should be contiguous, of one dtype, and full ", size, " times the piece");
  }
}

int64_t bytes_of(const std::vector<Tensor>& list) {
  int64_t n = 0;
  for (const auto& x : list) n += x.nbytes();
  return n;
}

CollectiveTag reducing(CollectiveTag tag, ReduceOp op) {
  tag.has_op = true;
  tag.op = op;
  return tag;
}
CollectiveTag rooted(CollectiveTag tag, int root) {
  tag.root = root;
  return tag;
}
CollectiveTag paying(CollectiveTag tag, int64_t bytes) {
  tag.payload = bytes;
  return tag;
}

}  // namespace

std::vector<int> MeshProcessGroup::everyone() const {
  std::vector<int> all;
  for (int i = 1; i < size(); ++i) all.push_back((rank_ + i) % size());
  return all;
}

std::vector<int> MeshProcessGroup::star(int root) const {
  if (rank_ == root) return everyone();
  return {root};
}

void MeshProcessGroup::check_member(const char* op) const {
  if (rank_ < 0) fail("[", op, "] this rank is not in group '", name_, "'");
}

void MeshProcessGroup::check_root(const char* op, int root) const {
  if (root < 0 || root >= size())
    fail("[", op, "] root ", root, " is no rank of group '", name_, "', which has ranks 0 to ",
         size() - 1);
}

Work MeshProcessGroup::broadcast(const Tensor& x, int root, Options options) {
  check_member("broadcast");
  check([&] {
    check_tensor("broadcast", "tensor", x);
    check_root("broadcast", root);
    if (rank_ != root) check_outputs("broadcast", "tensor", {&x, 1});
  });
  if (rank_ != root) x.bump_version();
  const auto tag = make_tag(CollectiveKind::kBroadcast, {&x, 1}, true, options.label);
  return issue(paying(rooted(tag, root), x.nbytes()), star(root), options,
               [=, this](Exchange& exchange) {
                 const Output output(x, exchange, rank_ == root);
                 exchange.broadcast(output.part(), root);
                 if (rank_ != root) output.finish();
               });
}

Work MeshProcessGroup::all_reduce(const Tensor& x, ReduceOp op, Options options) {
  check_member("all_reduce");
  check([&] {
    check_tensor("all_reduce", "tensor", x);
    check_reduce_op("all_reduce", op, x.dtype());
    check_outputs("all_reduce", "tensor", {&x, 1});
  });
  x.bump_version();
  const auto tag = make_tag(CollectiveKind::kAllReduce, {&x, 1}, true, options.label);
  return issue(paying(reducing(tag, op), x.nbytes()), everyone(), options,
               [=, this](Exchange& exchange) {
                 const Output output(x, exchange, true);
                 exchange.all_reduce({output.part()}, op);
                 output.finish();
               });
}

Work MeshProcessGroup::all_reduce_coalesced(const std::vector<Tensor>& tensors, ReduceOp op,
                                            Options options) {
  check_member("all_reduce_coalesced");
  check([&] {
    if (tensors.empty()) fail("[all_reduce_coalesced] got no tensors, should be one at least");
    for (size_t i = 0; i < tensors.size(); ++i) {
      check_tensor("all_reduce_coalesced", concat("tensors[", i, "]").c_str(), tensors[i]);
      check_reduce_op("all_reduce_coalesced", op, tensors[i].dtype());
    }
    check_outputs("all_reduce_coalesced", "tensors", tensors);
  });
  for (const auto& x : tensors) x.bump_version();
  const auto tag = make_tag(CollectiveKind::kAllReduce, tensors, true, options.label);
  return issue(paying(reducing(tag, op), bytes_of(tensors)), everyone(), options,
               [=, this](Exchange& exchange) {
                 std::vector<Output> outputs;
                 Exchange::Parts parts;
                 for (const auto& x : tensors) {
                   outputs.emplace_back(x, exchange, true);
                   parts.push_back(outputs.back().part());
                 }
                 exchange.all_reduce(parts, op);
                 for (const Output& o : outputs) o.finish();
               });
}

Work MeshProcessGroup::reduce(const Tensor& x, int root, ReduceOp op, Options options) {
  check_member("reduce");
  check([&] {
    check_tensor("reduce", "tensor", x);
    check_root("reduce", root);
    check_reduce_op("reduce", op, x.dtype());
    if (rank_ == root) check_outputs("reduce", "tensor", {&x, 1});
  });
  if (rank_ == root) x.bump_version();
  const auto tag = make_tag(CollectiveKind::kReduce, {&x, 1}, true, options.label);
  return issue(paying(rooted(reducing(tag, op), root), x.nbytes()), star(root), options,
               [=, this](Exchange& exchange) {
                 if (rank_ == root) {
                   const Output output(x, exchange, true);
                   exchange.reduce({}, {output.part()}, {output.part()}, op);
                   output.finish();
                 } else {
                   PartsOfRanks out(size());
                   out[root] = {part_of(dense(x, exchange))};
                   exchange.reduce(out, {}, {}, op);
                 }
               });
}

Work MeshProcessGroup::all_gather(const std::vector<Tensor>& outputs, const Tensor& input,
                                  Options options) {
  check_member("all_gather");
  check([&] {
    check_tensor("all_gather", "input", input);
    check_list("all_gather", "outputs", outputs, size(), input.dtype());
    if (outputs[rank_].numel() != input.numel())
      fail("[all_gather] input has shape ", input.sizes(), ", and outputs[", rank_,
           "], its place, has ", outputs[rank_].sizes());
    check_outputs("all_gather", "outputs", outputs);
  });
  for (const auto& o : outputs) o.bump_version();
  const auto tag = make_tag(CollectiveKind::kAllGather, {&input, 1}, false, options.label);
  return issue(paying(tag, bytes_of(outputs)), everyone(), options, [=, this](Exchange& exchange) {
    const Part mine = part_of(dense(input, exchange));
    std::vector<Output> to;
    PartsOfRanks out(size()), in(size());
    for (int r = 0; r < size(); ++r) {
      to.emplace_back(outputs[r], exchange);
      out[r] = {mine}, in[r] = {to[r].part()};
    }
    copy_part(in[rank_][0], mine);
    exchange.transfer(out, in);
    for (const auto& o : to) o.finish();
  });
}

Work MeshProcessGroup::gather(const std::vector<Tensor>& outputs, const Tensor& input, int root,
                              Options options) {
  check_member("gather");
  check([&] {
    check_tensor("gather", "input", input);
    check_root("gather", root);
    if (rank_ != root && !outputs.empty())
      fail("[gather] outputs were given on rank ", rank_, ", should be on the root ", root,
           " alone");
    if (rank_ == root) {
      check_list("gather", "outputs", outputs, size(), input.dtype());
      if (outputs[root].numel() != input.numel())
        fail("[gather] input has shape ", input.sizes(), ", and outputs[", root,
             "], its place, has ", outputs[root].sizes());
    }
    check_outputs("gather", "outputs", outputs);
  });
  for (const auto& o : outputs) o.bump_version();
  const auto tag = make_tag(CollectiveKind::kGather, {&input, 1}, false, options.label);
  return issue(paying(rooted(tag, root), input.nbytes()), star(root), options,
               [=, this](Exchange& exchange) {
                 const Part mine = part_of(dense(input, exchange));
                 std::vector<Output> to;
                 PartsOfRanks out(size()), in(size());
                 if (rank_ == root) {
                   for (int r = 0; r < size(); ++r) {
                     to.emplace_back(outputs[r], exchange);
                     in[r] = {to[r].part()};
                   }
                   copy_part(in[root][0], mine);
                 } else {
                   out[root] = {mine};
                 }
                 exchange.transfer(out, in);
                 for (const auto& o : to) o.finish();
               });
}

Work MeshProcessGroup::scatter(const Tensor& output, const std::vector<Tensor>& inputs, int root,
                               Options options) {
  check_member("scatter");
  check([&] {
    check_tensor("scatter", "output", output);
    check_root("scatter", root);
    if (rank_ != root && !inputs.empty())
      fail("[scatter] inputs were given on rank ", rank_, ", should be on the root ", root,
           " alone");
    if (rank_ == root) {
      check_list("scatter", "inputs", inputs, size(), output.dtype());
      if (inputs[root].numel() != output.numel())
        fail("[scatter] output has shape ", output.sizes(), ", and inputs[", root,
             "], meant for it, has ", inputs[root].sizes());
    }
    check_outputs("scatter", "output", {&output, 1});
  });
  output.bump_version();
  const auto tag = make_tag(CollectiveKind::kScatter, {&output, 1}, false, options.label);
  return issue(paying(rooted(tag, root), output.nbytes()), star(root), options,
               [=, this](Exchange& exchange) {
                 const Output to(output, exchange);
                 PartsOfRanks out(size()), in(size());
                 if (rank_ == root) {
                   for (int r = 0; r < size(); ++r) out[r] = {part_of(dense(inputs[r], exchange))};
                   copy_part(to.part(), out[root][0]);
                 } else {
                   in[root] = {to.part()};
                 }
                 exchange.transfer(out, in);
                 to.finish();
               });
}

Work MeshProcessGroup::reduce_scatter(const Tensor& output, const std::vector<Tensor>& inputs,
                                      ReduceOp op, Options options) {
  check_member("reduce_scatter");
  check([&] {
    check_tensor("reduce_scatter", "output", output);
    check_list("reduce_scatter", "inputs", inputs, size(), output.dtype());
    check_reduce_op("reduce_scatter", op, output.dtype());
    if (inputs[rank_].numel() != output.numel())
      fail("[reduce_scatter] output has shape ", output.sizes(), ", and inputs[", rank_,
           "], meant for it, has ", inputs[rank_].sizes());
    check_outputs("reduce_scatter", "output", {&output, 1});
  });
  output.bump_version();
  const auto tag = make_tag(CollectiveKind::kReduceScatter, {&output, 1}, false, options.label);
  return issue(paying(reducing(tag, op), bytes_of(inputs)), everyone(), options,
               [=, this](Exchange& exchange) {
                 const Output to(output, exchange);
                 PartsOfRanks out(size());
                 for (int r = 0; r < size(); ++r) out[r] = {part_of(dense(inputs[r], exchange))};
                 exchange.reduce(out, out[rank_], {to.part()}, op);
                 to.finish();
               });
}

Work MeshProcessGroup::all_to_all(const std::vector<Tensor>& outputs,
                                  const std::vector<Tensor>& inputs, Options options) {
  check_member("all_to_all");
  check([&] {
    if (inputs.empty()) fail("[all_to_all] got no inputs, should be ", size(), ": one a rank");
    check_tensor("all_to_all", "inputs[0]", inputs[0]);
    check_list("all_to_all", "inputs", inputs, size(), inputs[0].dtype());
    check_list("all_to_all", "outputs", outputs, size(), inputs[0].dtype());
    if (inputs[rank_].numel() != outputs[rank_].numel())
      fail("[all_to_all] inputs[", rank_, "] has shape ", inputs[rank_].sizes(), ", and outputs[",
           rank_, "], its place, has ", outputs[rank_].sizes());
    check_outputs("all_to_all", "outputs", outputs);
  });
  for (const auto& o : outputs) o.bump_version();
  const auto tag = make_tag(CollectiveKind::kAllToAll, inputs, false, options.label);
  return issue(paying(tag, bytes_of(inputs)), everyone(), options, [=, this](Exchange& exchange) {
    std::vector<Output> to;
    PartsOfRanks out(size()), in(size());
    for (int r = 0; r < size(); ++r) {
      out[r] = {part_of(dense(inputs[r], exchange))};
      to.emplace_back(outputs[r], exchange);
      in[r] = {to[r].part()};
    }
    copy_part(in[rank_][0], out[rank_][0]);
    exchange.transfer(out, in);
    for (const auto& o : to) o.finish();
  });
}

Work MeshProcessGroup::barrier(Options options) {
  check_member("barrier");
  const auto tag = make_tag(CollectiveKind::kBarrier, {}, true, options.label);
  return issue(tag, everyone(), options, [](Exchange& exchange) { exchange.transfer({}, {}); });
}

Work MeshProcessGroup::all_gather_pieces(const std::vector<Tensor>& full,
                                         const std::vector<Tensor>& pieces, Options options) {
  check_member("all_gather_pieces");
  check([&] {
    check_pieces("all_gather_pieces", full, pieces, size());
    check_outputs("all_gather_pieces", "full", full);
  });
  const auto tag = make_tag(CollectiveKind::kAllGather, pieces, true, options.label);
  return issue(paying(tag, bytes_of(full)), everyone(), options, [=, this](Exchange& exchange) {
    PartsOfRanks out(size()), in(size());
    for (size_t i = 0; i < full.size(); ++i) {
      const Part whole = part_of(full[i]), mine = part_of(pieces[i]);
      for (int r = 0; r < size(); ++r) {
        out[r].push_back(mine);
        in[r].push_back(whole.slice(r * mine.numel, mine.numel));
      }
      copy_part(in[rank_][i], mine);
    }
    exchange.transfer(out, in);
  });
}

Work MeshProcessGroup::reduce_scatter_pieces(const std::vector<Tensor>& pieces,
                                             const std::vector<Tensor>& full, ReduceOp op,
                                             Options options) {
  check_member("reduce_scatter_pieces");
  check([&] {
    check_pieces("reduce_scatter_pieces", full, pieces, size());
    for (const auto& x : full) check_reduce_op("reduce_scatter_pieces", op, x.dtype());
    check_outputs("reduce_scatter_pieces", "pieces", pieces);
  });
  const auto tag = make_tag(CollectiveKind::kReduceScatter, pieces, true, options.label);
  return issue(paying(reducing(tag, op), bytes_of(full)), everyone(), options,
               [=, this](Exchange& exchange) {
                 PartsOfRanks out(size());
                 Parts to;
                 for (size_t i = 0; i < full.size(); ++i) {
                   const Part whole = part_of(full[i]);
                   to.push_back(part_of(pieces[i]));
                   for (int r = 0; r < size(); ++r)
                     out[r].push_back(whole.slice(r * to[i].numel, to[i].numel));
                 }
                 exchange.reduce(out, out[rank_], to, op);
               });
}

}  // namespace sherd::dist
