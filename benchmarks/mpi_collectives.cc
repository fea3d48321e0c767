// The Open MPI side of collectives_side_by_side.py, which compiles and runs it: the same
// collectives and sizes, the best of 5 series, as "op,bytes,microseconds".
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

double cost_of(int calls, const std::function<void()>& f) {
  double best = 1e30;
  for (int series = 0; series < 5; ++series) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    for (int i = 0; i < calls; ++i) f();
    best = std::min(best, (MPI_Wtime() - start) * 1e6 / calls);
  }
  return best;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const MPI_Comm all = MPI_COMM_WORLD;
  for (long bytes = 1 << 10; bytes <= 256 << 20; bytes *= 4) {
    const int piece = int(bytes / 4 / ranks), n = piece * ranks;
    std::vector<float> x(n, 1.0f), y(piece, 1.0f);
    const int calls = bytes <= 1 << 16 ? 200 : bytes <= 4 << 20 ? 20 : 4;
    auto show = [&](const char* op, const std::function<void()>& f) {
      const double us = cost_of(calls, f);
      if (rank == 0) std::printf("%s,%ld,%.1f\n", op, bytes, us);
    };
    show("all_reduce", [&] { MPI_Allreduce(MPI_IN_PLACE, x.data(), n, MPI_FLOAT, MPI_SUM, all); });
    show("all_gather", [&] {
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, x.data(), piece, MPI_FLOAT, all);
    });
    show("reduce_scatter",
         [&] { MPI_Reduce_scatter_block(x.data(), y.data(), piece, MPI_FLOAT, MPI_SUM, all); });
    show("broadcast", [&] { MPI_Bcast(x.data(), n, MPI_FLOAT, 0, all); });
  }
  MPI_Finalize();
}
