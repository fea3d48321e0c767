#include "distributed/memory_forecast.h"

#include <algorithm>
#include <vector>

namespace sherd::dist {
namespace {

int64_t allocated(int64_t elements, int64_t size) { return (elements * size + 63) / 64 * 64; }

// Bytes of one unit.
struct Bytes {
  int64_t piece = 0;         // c m
  int64_t optimizer = 0;     // c o
  int64_t full = 0;          // p U
  int64_t grad = 0;          // d U
  int64_t sharded_grad = 0;  // c g
  int64_t reduced = 0;       // what the reduction writes while the full gradient is there: c d
  int64_t in_place = 0;      // of grad: what becomes the sharded gradient itself
  int64_t master = 0;        // m U
  Bytes& operator+=(const Bytes& o) {
    piece += o.piece, optimizer += o.optimizer, full += o.full, grad += o.grad;
    sharded_grad += o.sharded_grad, reduced += o.reduced, in_place += o.in_place;
    master += o.master;
    return *this;
  }
};

Bytes bytes_of(const UnitLayout& unit, const ForecastOptions& options) {
  Bytes b;
  for (const FlatLayout& g : unit.groups()) {
    const DType param = options.param_dtype.value_or(g.dtype());
    const DType reduce = options.reduce_dtype.value_or(param);
    const DType sharded = options.keep_low_precision_grads ? reduce : g.dtype();
    const bool whole = g.shards() == 1;
    b.piece += allocated(g.piece(), size_of(g.dtype()));
    b.master += allocated(g.padded(), size_of(g.dtype()));
    // On one rank the piece is the full buffer.
    if (!whole || param != g.dtype()) b.full += allocated(g.padded(), size_of(param));
    if (!g.requires_grad()) continue;
    b.optimizer += allocated(g.piece(), options.optimizer_bytes);
    b.sharded_grad += allocated(g.piece(), size_of(sharded));
    b.grad += allocated(g.padded(), size_of(reduce));
    if (!whole) {
      b.reduced += allocated(g.piece(), size_of(reduce));
    } else if (!options.adds_to_gradients) {
      b.reduced += allocated(g.piece(), size_of(sharded));
      if (reduce == sharded) b.in_place += allocated(g.piece(), size_of(sharded));
    }
  }
  return b;
}

}  // namespace

ScheduledUnit scheduled_unit(const UnitLayout& unit, const ForecastOptions& options) {
  const Bytes b = bytes_of(unit, options);
  return {.full_bytes = b.full,
          .grad_bytes = b.grad,
          .gathers = b.full > 0,
          .reshard_after_forward = options.reshard_after_forward};
}

MemoryForecast forecast_memory(std::span<const UnitLayout> units, const ForecastOptions& options) {
  if (units.empty()) fail("[forecast_memory] needs at least the root unit");
  std::vector<Bytes> unit;
  std::vector<ScheduledUnit> scheduled;
  Bytes sum;
  MemoryForecast f;
  for (const UnitLayout& u : units) {
    unit.push_back(bytes_of(u, options));
    scheduled.push_back(scheduled_unit(u, options));
    sum += unit.back();
    f.summon_unit = std::max(f.summon_unit, unit.back().master);
  }
  const int n = int(unit.size()) - 1;  // the root
  const Bytes& root = unit[n];
  f.parameters = sum.piece;
  f.optimizer = sum.optimizer;
  f.gradients = sum.sharded_grad;
  f.after_zero_grad = f.parameters + f.optimizer;
  f.after_step = f.after_zero_grad + f.gradients;
  f.pending = sum.grad;
  f.summon_model = sum.master;
  const int64_t base =
      f.after_zero_grad + (options.adds_to_gradients ? f.gradients : 0) + options.exchange_bytes;
  const GatherSchedule schedule(scheduled, options.schedule);
  const int64_t bound = schedule.max_bytes();

  // Forward: the root's, and the current unit's with those gathered ahead; or all so far.
  int64_t window = 0, kept = 0;
  for (int i = 0; i < n; ++i) {
    int64_t bytes = unit[i].full;
    for (int j = i + 1; j < n && j - i <= options.schedule.forward_prefetch; ++j) {
      if (bytes + unit[j].full > bound) break;
      bytes += unit[j].full;
    }
    window = std::max(window, kept + bytes);
    if (!options.reshard_after_forward) kept += unit[i].full;
  }
  f.forward = base + root.full + window;

  // Backward: the root's gradient comes first and goes last. Of unit i and the next, j: `now`,
  // while i's gradient is computed; `later`, while it is reduced and j's is computed.
  int64_t peak = root.grad, done = 0;
  int64_t full = options.reshard_after_forward ? 0 : sum.full - root.full;  // not yet left
  for (int i = n - 1; i >= 0; --i) {
    const Bytes &u = unit[i], next = i ? unit[i - 1] : Bytes{};
    int64_t now = u.full + u.grad - u.in_place, later = u.grad - u.in_place;
    if (options.reshard_after_forward) {
      const bool early = options.schedule.backward_prefetch == BackwardPrefetch::kPre &&
                         u.full + u.grad + next.full <= bound &&
                         u.grad + next.full + next.grad <= bound;
      if (early) {
        now += next.full;
        later += next.full + next.grad;
      }
    } else {
      // Nothing is gathered, so the reduction may last until the next unit that has gradients.
      now += full - u.full;
      full -= u.full;
      int j = i - 1;
      int64_t left = full;
      for (; j > 0 && !unit[j].grad; --j) left -= unit[j].full;
      if (j >= 0) later += left + unit[j].grad;
    }
    // The reduction may have begun before i's full parameters are released.
    peak = std::max(peak, root.grad + done + u.reduced + std::max(now, later));
    if (!options.adds_to_gradients) done += u.sharded_grad;
  }
  const int64_t own = done + root.grad - root.in_place + root.reduced;
  f.backward = base + root.full + std::max(peak, own);
  return f;
}

}  // namespace sherd::dist
