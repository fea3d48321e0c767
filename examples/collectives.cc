// Each primitive of sherd::dist once: what every rank had, and what it has.
//
//     ./bazelw run //examples:collectives                          # starts 3 ranks on this machine
//     ./bazelw run //examples:collectives -- --nproc_per_node=4
//     sherdrun --nproc_per_node=2 collectives                      # under a launcher
//     mpirun -n 2 collectives
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>

#include "sherd.h"

using namespace sherd;

namespace {

std::string text_of(const Tensor& x) {
  const Tensor numbers = to_raw(contiguous_raw(x), kFloat64);
  std::string s = "[";
  char number[32];
  for (int64_t i = 0; i < x.numel(); ++i) {
    std::snprintf(number, sizeof number, i ? ", %g" : "%g", numbers.data<double>()[i]);
    s += number;
  }
  return s + "]";
}
std::string text_of(const std::vector<Tensor>& list) {
  std::string s;
  for (const Tensor& x : list) s += (s.empty() ? "" : " ") + text_of(x);
  return s.empty() ? "nothing" : s;
}

// Rank 0 prints all ranks' lines, in order: two gathers, of the lengths and of the letters.
void print(const std::string& title, const std::string& line) {
  const int ranks = dist::world_size();
  const Tensor length = tensor<int64_t>({int64_t(line.size())});
  const Tensor letters = empty({int64_t(line.size())}, kUInt8);
  std::memcpy(letters.data<uint8_t>(), line.data(), line.size());
  std::vector<Tensor> lengths, lines;
  if (dist::rank() == 0)
    for (int r = 0; r < ranks; ++r) lengths.push_back(zeros({1}, kInt64));
  dist::gather(lengths, length, 0);
  for (const Tensor& n : lengths) lines.push_back(empty({n.item<int64_t>()}, kUInt8));
  dist::gather(lines, letters, 0);
  if (dist::rank() != 0) return;
  std::printf("\n%s\n", title.c_str());
  for (int r = 0; r < ranks; ++r)
    std::printf("  rank %d %.*s\n", r, int(lines[r].numel()),
                reinterpret_cast<const char*>(lines[r].data<uint8_t>()));
  std::fflush(stdout);
}

template <class A, class B>
void print(const std::string& title, const A& had, const B& has) {
  print(title, "had " + had + ", has " + text_of(has));
}

void run() {
  const int rank = dist::rank(), ranks = dist::world_size(), last = ranks - 1;
  const float r = float(rank);
  // Two numbers that tell whose they are: [10, 11] on rank 1.
  auto mine = [&] { return tensor<float>({10 * r, 10 * r + 1}); };
  auto one_a_rank = [&] {
    std::vector<Tensor> list;
    for (int i = 0; i < ranks; ++i) list.push_back(tensor<float>({10 * r + float(i)}));
    return list;
  };

  Tensor x = mine();
  dist::broadcast(x, last);
  print("broadcast from the last rank", text_of(mine()), x);

  for (auto op : {dist::ReduceOp::kSum, dist::ReduceOp::kAvg, dist::ReduceOp::kProduct,
                  dist::ReduceOp::kMin, dist::ReduceOp::kMax}) {
    x = mine();
    dist::all_reduce(x, op);
    print(std::string("all_reduce ") + dist::name_of(op), text_of(mine()), x);
  }

  x = mine();
  dist::reduce(x, 0);
  print("reduce to rank 0 (the others keep theirs)", text_of(mine()), x);

  std::vector<Tensor> list;
  for (int i = 0; i < ranks; ++i) list.push_back(zeros({2}));
  dist::all_gather(list, mine());
  print("all_gather", text_of(mine()), list);

  Tensor whole = zeros({2 * ranks});
  dist::all_gather_into_tensor(whole, mine());
  print("all_gather_into_tensor", text_of(mine()), whole);

  list.clear();
  if (rank == 0)
    for (int i = 0; i < ranks; ++i) list.push_back(zeros({2}));
  dist::gather(list, mine(), 0);
  print("gather to rank 0", text_of(mine()), list);

  list = rank == 0 ? one_a_rank() : std::vector<Tensor>();
  x = zeros({1});
  dist::scatter(x, list, 0);
  print("scatter from rank 0", text_of(list), x);

  x = zeros({1});
  dist::reduce_scatter(x, one_a_rank());
  print("reduce_scatter", text_of(one_a_rank()), x);

  list.clear();
  for (int i = 0; i < ranks; ++i) list.push_back(zeros({1}));
  dist::all_to_all(list, one_a_rank());
  print("all_to_all", text_of(one_a_rank()), list);

  // Rank r sends i + 1 elements to rank i, so it gets r + 1 from each.
  std::vector<int64_t> to_each, from_each(size_t(ranks), rank + 1);
  for (int i = 0; i < ranks; ++i) to_each.push_back(i + 1);
  const Tensor rows = full({ranks * (ranks + 1) / 2}, rank);
  x = zeros({ranks * (rank + 1)});
  dist::all_to_all_single(x, rows, from_each, to_each);
  print("all_to_all_single, unequal splits", text_of(rows), x);

  if (ranks > 1) {
    x = zeros({2});
    const int next = (rank + 1) % ranks, before = (rank + last) % ranks;
    const dist::Work sent = dist::isend(mine(), next);
    const int source = dist::recv(x, before);
    sent.wait();
    print(
        "isend to the next rank, recv from the one before",
        "had " + text_of(mine()) + ", has " + text_of(x) + " from rank " + std::to_string(source));
  }

  // Asynchronous: the tensors may not be touched before wait().
  Tensor a = mine(), b = mine();
  const dist::Work first = dist::all_reduce(a, dist::ReduceOp::kSum, {.async = true});
  const dist::Work second = dist::broadcast(b, 0, {.async = true, .label = "second"});
  second.wait();
  first.wait();
  print("all_reduce and broadcast, asynchronous", text_of({mine(), mine()}),
        std::vector<Tensor>{a, b});

  // A subgroup. All ranks make it; those in it use it.
  const dist::Group ends =
      dist::new_group(ranks > 1 ? std::vector<int>{0, last} : std::vector<int>{0});
  x = mine();
  if (ends->rank() >= 0) dist::all_reduce(x, dist::ReduceOp::kSum, {.group = ends});
  print("all_reduce among the first and the last rank", text_of(mine()), x);

  dist::barrier();
  if (rank == 0) std::printf("\nbarrier: all %d ranks were here\n", ranks);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Each primitive of sherd::dist once.");
  std::string nproc = "3";
  app.add_option("--nproc_per_node,--nproc-per-node", nproc,
                 "ranks to start here: a number, cpu, gpu or auto");
  CLI11_PARSE(app, argc, argv);
  try {
    if (auto code = dist::launch_self(dist::parse_nproc_per_node(nproc), argc, argv)) return *code;
    dist::init_process_group();
    run();
    dist::destroy_process_group();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
