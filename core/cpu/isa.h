// One source, two instruction sets, in one object file: the loop is a template with a target
// attribute; the formula below it is inlined (flatten) and compiled for that target. No second
// compilation, and no inline function that AVX-512 could leak into.
#pragma once
#define SHERD_AVX512                                                                         \
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"), gnu::flatten, \
    gnu::noinline]]
#define SHERD_AVX2 [[gnu::flatten, gnu::noinline]]
namespace sherd::cpu {
bool has_avx512();  // of this processor, unless the environment variable SHERD_NO_AVX512 is set
void set_avx512(bool on);  // for tests, which compare both; on: where the processor has it
}  // namespace sherd::cpu
