#include "tests/distributed/spawn.h"

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/context.h"

namespace sherd::dist {

void run_ranks(int ranks, const std::function<void(int rank)>& f, const RankOptions& options) {
  auto store = std::make_shared<MemoryStore>();
  std::mutex mutex;
  std::string errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Context context;
      ContextGuard guard(context);
      try {
        if (options.init)
          init_process_group({.rank = rank,
                              .world_size = ranks,
                              .timeout = options.timeout,
                              .store = store,
                              .local_rank = rank,
                              .local_world_size = ranks});
        f(rank);
        if (is_initialized()) destroy_process_group();
      } catch (const std::exception& e) {
        std::lock_guard lock(mutex);
        errors += concat(errors.empty() ? "" : "\n", "rank ", rank, ": ", e.what());
      }
    });
  }
  for (auto& t : threads) t.join();
  if (!errors.empty()) throw Error(errors);
}

}  // namespace sherd::dist
