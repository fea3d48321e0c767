// tree_reduce: the ranks' values combined in one fixed binary tree, so that every backend, every
// chunk size and every run gives the same bits:
//
//     T[a, b) = T[a, a + h) + T[a + h, b),  h = the largest power of two < b - a
//
// Up to three ranks that is the sum in rank order; for a power of two it is the sum over pairs of
// halves, so that a sum over nodes of sums inside nodes is the same. Each node is rounded to the
// dtype (float16 and bfloat16 are added in float32 and rounded to nearest even).
//
//     const char* inputs[] = {rank0, rank1, rank2};
//     tree_reduce(ReduceOp::kSum, kFloat32, inputs, out, n);
#pragma once
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "distributed/reduce_op.h"

namespace sherd::dist {

// Error, tagged [op], where `reduce` is not defined for the dtype.
void check_reduce_op(const char* op, ReduceOp reduce, DType dtype);

// out[i] = the tree over inputs[r][i], r the rank, for i in [0, n). `out` may be one of the inputs,
// or apart from all; no alignment is asked for. AVG divides by averaged_over; 0: by the number of
// inputs (which are less where inputs are sums themselves). Error as check_reduce_op.
void tree_reduce(ReduceOp op, DType dtype, std::span<const char* const> inputs, char* out,
                 int64_t n, int averaged_over = 0);

}  // namespace sherd::dist
