#include "core/dropout.h"

#include <cmath>

#include "core/cpu/convert.h"
#include "core/cpu/isa.h"
#include "core/cpu/philox_lanes.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// factor[i] = 0 or `keep` for the elements of a group
template <class T>
[[gnu::always_inline]] inline void factors(const Generator::Draw& draw, uint32_t threshold, T keep,
                                           int64_t group, T* __restrict factor) {
  RandomWords words;
  make_words(draw, group, words);
  const uint32_t* word = words.word[0];
  for (int64_t i = 0; i < kGroup; ++i) factor[i] = word[i] >= threshold ? keep : T(0);
}
template <class T>
SHERD_AVX2 void factors_avx2(const Generator::Draw& draw, uint32_t threshold, T keep, int64_t group,
                             T* factor) {
  factors(draw, threshold, keep, group, factor);
}
template <class T>
SHERD_AVX512 void factors_avx512(const Generator::Draw& draw, uint32_t threshold, T keep,
                                 int64_t group, T* factor) {
  factors(draw, threshold, keep, group, factor);
}

void dropout(const Stream& stream, const Tensor& x, double p, Generator::Draw draw,
             const Tensor& y) {
  if (!x.is_contiguous() || !y.is_contiguous()) {
    const Tensor whole = empty(y.sizes(), y.dtype());
    dropout(stream, contiguous_raw(x), p, draw, whole);
    return copy_raw(y, whole);
  }
  auto go = [&]<class T>(Type<T>) {
    // The mask is 1 - p as nearly as 32 bits can say; at p = 1 no word is kept.
    const uint32_t threshold = uint32_t(std::min(std::round(p * 0x1p32), 0x1p32 - 1));
    const T keep = p < 1 ? T(1 / (1 - p)) : T(0);
    const int64_t size = size_of(x.dtype());
    const Convert read = convert(dtype_of<T>, x.dtype()), write = convert(x.dtype(), dtype_of<T>);
    const char* from = x.bytes();
    char* to = y.bytes();
    auto run = has_avx512() ? factors_avx512<T> : factors_avx2<T>;
    parallel_for(x.numel(), 32768, [&](int64_t begin, int64_t end) {
      for_groups(begin, end, kGroup, [&](int64_t group, int64_t first, int64_t a, int64_t b) {
        T factor[kGroup], value[kGroup];
        run(draw, threshold, keep, group, factor);
        read(reinterpret_cast<char*>(value), sizeof(T), from + a * size, size, b - a);
        for (int64_t i = a; i < b; ++i) value[i - a] *= factor[i - first];
        write(to + a * size, size, reinterpret_cast<const char*>(value), sizeof(T), b - a);
      });
    });
  };
  x.dtype() == kFloat64 ? go(Type<double>{}) : go(Type<float>{});
}

const Register r{dropout_kernel, DeviceType::kCPU, dropout};

}  // namespace
}  // namespace sherd::cpu
