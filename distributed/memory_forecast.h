// What a sharded model needs in memory, from its layouts and options alone: bytes a rank, beside
// activations.
//
//     MemoryForecast f = forecast_memory(layouts, {.param_dtype = kBFloat16});   // the root last
//     if (f.backward > free_bytes) ...
//
// U elements of a unit (padded), c = U / s of a rank, E the root's U; p, d, m, g bytes an element
// of full parameters, reduced gradients, master copy and sharded gradient; o of optimizer state.
// Buffers are counted as the allocator does, in multiples of 64 bytes. A forecast is never below
// what the runtime takes, and at most a few percent above.
#pragma once
#include <optional>
#include <span>

#include "distributed/flat_layout.h"
#include "distributed/gather_schedule.h"

namespace sherd::dist {

struct ForecastOptions {
  std::optional<DType> param_dtype = {},
                       reduce_dtype = {};  // none: the master's; reduce_dtype: param_dtype
  bool keep_low_precision_grads = false;   // sharded gradients in reduce_dtype
  int64_t optimizer_bytes = 8;             // o, an element that is trained; AdamW: 8
  bool reshard_after_forward = true;       // FULL_SHARD; false: SHARD_GRAD_OP, NO_SHARD
  bool adds_to_gradients = false;          // gradients of an earlier backward are kept and added to
  GatherSchedule::Options schedule = {};
  int64_t exchange_bytes = 0;  // room that the collectives themselves work in
};

struct MemoryForecast {
  int64_t parameters = 0;  // pieces: sum of c m
  int64_t optimizer = 0;   // sum of c o
  int64_t gradients = 0;   // sum of c g

  int64_t after_zero_grad = 0;  // parameters + optimizer
  int64_t after_step = 0;       // with the gradients
  int64_t forward = 0;          // most at once
  int64_t backward = 0;
  int64_t pending = 0;       // added by no_sync until the sync: full gradients, sum of d U
  int64_t summon_unit = 0;   // added by summon_full_params, a unit at a time: largest m U
  int64_t summon_model = 0;  // added by it for the whole model: sum of m U
};

// Units in module order: children first, the root last; all with the same number of shards. The
// forecast is of a model that calls each unit once a forward, in that order.
MemoryForecast forecast_memory(std::span<const UnitLayout> units, const ForecastOptions& options);

// What the schedule needs to know of a unit under these options.
ScheduledUnit scheduled_unit(const UnitLayout& unit, const ForecastOptions& options);

}  // namespace sherd::dist
