// ReduceOp: how a collective combines the ranks' values, element by element.
#pragma once
#include <cstdint>
#include <string>

namespace sherd::dist {

// kSum of bool is "or", kProduct "and"; integers wrap around. kAvg is the sum divided by the number
// of ranks, rounded once more to the dtype; for floating types only. kMin and kMax give NaN where
// any rank has NaN. kBand, kBor and kBxor are bit by bit; for integers and bool only.
enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };
const char* name_of(ReduceOp op);
inline std::string to_string(ReduceOp op) { return name_of(op); }

}  // namespace sherd::dist
