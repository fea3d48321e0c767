// Each collective once, with what every rank had before and has after.
//
//     ./bazelw run //examples:collectives                          # 4 ranks here
//     ./bazelw run //examples:collectives -- --nproc_per_node=2
//     sherdrun --nproc_per_node=4 collectives                      # or under a launcher
//     mpirun -n 4 collectives
#include <cstdio>
#include <string>

#include "examples/support/main.h"
#include "sherd.h"

namespace examples {
namespace {

using namespace sherd;

std::string text(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.numel(); ++i)
    s += (i ? " " : "") + std::to_string(t.data<int64_t>()[i]);
  return s + "]";
}

std::string text(const std::vector<Tensor>& tensors) {
  std::string s;
  for (const Tensor& t : tensors) s += (s.empty() ? "" : " ") + text(t);
  return s.empty() ? "nothing" : s;
}

// n numbers that tell this rank from the others: 10 rank, 10 rank + 1, ...
Tensor mine(int64_t n) { return arange(n) + 10 * dist::rank(); }

std::vector<Tensor> room(int64_t count, int64_t n) {
  std::vector<Tensor> tensors;
  for (int64_t i = 0; i < count; ++i) tensors.push_back(zeros({n}, kInt64));
  return tensors;
}

// Rank 0 prints for all, so that lines come in order; texts travel through the job's store.
void show(const std::string& title, const std::string& had, const std::string& has) {
  const auto& store = dist::default_store();
  const std::string key = "collectives/" + title + "/";
  store->set(key + std::to_string(dist::rank()), "had " + had + "  has " + has);
  if (dist::rank() != 0) return;
  std::printf("%s\n", title.c_str());
  for (int r = 0; r < dist::world_size(); ++r)
    std::printf("  rank %d  %s\n", r, store->get(key + std::to_string(r)).c_str());
}

void one_to_many(int64_t n) {
  Tensor x = mine(2);
  std::string had = text(x);
  dist::broadcast(x, /*root=*/0);
  show("broadcast from rank 0", had, text(x));

  // The root has a tensor for each rank; the others give none.
  const std::vector<Tensor> inputs = dist::rank() == 0 ? split(mine(n), 1) : std::vector<Tensor>();
  Tensor part = zeros({1}, kInt64);
  dist::scatter(part, inputs, /*root=*/0);
  show("scatter from rank 0", text(inputs), text(part));
}

void many_to_one(int64_t n) {
  Tensor x = mine(2);
  std::string had = text(x);
  dist::reduce(x, /*root=*/0);
  show("reduce to rank 0", had, text(x));

  const std::vector<Tensor> outputs = dist::rank() == 0 ? room(n, 2) : std::vector<Tensor>();
  dist::gather(outputs, mine(2), /*root=*/0);
  show("gather to rank 0", text(mine(2)), text(outputs));
}

void many_to_many(int64_t n) {
  for (auto [op, name] :
       {std::pair(dist::ReduceOp::kSum, "SUM"), std::pair(dist::ReduceOp::kProduct, "PRODUCT"),
        std::pair(dist::ReduceOp::kMin, "MIN"), std::pair(dist::ReduceOp::kMax, "MAX")}) {
    Tensor x = mine(2);
    dist::all_reduce(x, op);
    show(concat("all_reduce ", name), text(mine(2)), text(x));
  }
  // Averages are of floating point numbers.
  Tensor average = mine(2).to(kFloat32);
  dist::all_reduce(average, dist::ReduceOp::kAvg);
  show("all_reduce AVG", text(mine(2)), text(average.to(kInt64)));

  std::vector<Tensor> each = room(n, 2);
  dist::all_gather(each, mine(2));
  show("all_gather", text(mine(2)), text(each));

  Tensor whole = zeros({2 * n}, kInt64);
  dist::all_gather_into_tensor(whole, mine(2));
  show("all_gather_into_tensor", text(mine(2)), text(whole));

  Tensor sum = zeros({1}, kInt64);
  dist::reduce_scatter(sum, split(mine(n), 1));
  show("reduce_scatter", text(split(mine(n), 1)), text(sum));

  dist::reduce_scatter_tensor(sum, mine(n));
  show("reduce_scatter_tensor", text(mine(n)), text(sum));

  each = room(n, 1);
  dist::all_to_all(each, split(mine(n), 1));
  show("all_to_all", text(split(mine(n), 1)), text(each));

  // Rank r sends r + 1 numbers to each rank, so it gets 1, 2, ... from ranks 0, 1, ...
  const int64_t k = dist::rank() + 1;
  std::vector<int64_t> from(n), to(n, k);
  for (int64_t r = 0; r < n; ++r) from[r] = r + 1;
  Tensor all = zeros({n * (n + 1) / 2}, kInt64);
  dist::all_to_all_single(all, mine(n * k), from, to);
  show("all_to_all_single", text(mine(n * k)), text(all));

  dist::barrier();
  show("barrier", "nothing", "nothing");
}

void one_to_one(int n) {
  if (n == 1) return show("send, recv", "no other rank", "nothing");
  const int next = (dist::rank() + 1) % n, previous = (dist::rank() + n - 1) % n;
  Tensor x = zeros({2}, kInt64);
  // A send waits for its receiver: in a ring of sends nobody would get to receive.
  if (dist::rank() % 2 == 0) dist::send(mine(2), next);
  dist::recv(x, previous);
  if (dist::rank() % 2 == 1) dist::send(mine(2), next);
  show("send to the next, recv", text(mine(2)), text(x));

  dist::Work sending = dist::isend(mine(2), previous);
  dist::Work receiving = dist::irecv(x, next);
  receiving.wait();
  sending.wait();
  show("isend to the previous, irecv", text(mine(2)), text(x));
}

void asynchronous() {
  Tensor x = mine(2), y = mine(2);
  dist::Work first = dist::all_reduce(x, dist::ReduceOp::kSum, {.async = true});
  dist::Work second = dist::all_reduce(y, dist::ReduceOp::kMax, {.async = true});
  // Here the program computes, and touches neither x nor y.
  second.wait();
  first.wait();
  const bool done = first.is_completed() && second.is_completed();
  show("two all_reduce, async", text(mine(2)),
       text(std::vector<Tensor>{x, y}) + (done ? " completed" : " not completed"));
}

void subgroup(int n) {
  std::vector<int> even;
  for (int r = 0; r < n; r += 2) even.push_back(r);
  dist::Group group = dist::new_group(even);  // every rank of the job makes this call
  Tensor x = mine(2);
  if (group->rank() >= 0) dist::all_reduce(x, dist::ReduceOp::kSum, {.group = group});
  show("all_reduce of the even ranks", text(mine(2)), text(x));
}

void run() {
  dist::init_process_group();
  const int n = dist::world_size();
  one_to_many(n);
  many_to_one(n);
  many_to_many(n);
  one_to_one(n);
  asynchronous();
  subgroup(n);
  dist::destroy_process_group();
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) {
  CLI::App app{"Shows what each collective does."};
  return examples::run_ranks(app, /*nproc_per_node=*/4, argc, argv, examples::run);
}
