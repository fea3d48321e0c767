#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

#include "core/cpu/product.h"
#include "core/gemm.h"
#include "core/parallel_for.h"

namespace sherd {
namespace {

GemmBackend initial_backend() {
  const char* s = std::getenv("SHERD_GEMM");
#ifdef __SANITIZE_THREAD__
  // oneDNN's threads synchronise in a library that the sanitizer cannot see into.
  if (!s) return GemmBackend::kEigen;
#endif
  const std::string name = s ? s : "onednn";
  if (name == "onednn") return GemmBackend::kOneDNN;
  if (name == "eigen") return GemmBackend::kEigen;
  fail("SHERD_GEMM is \"", name, "\"; it can be onednn or eigen");
}
std::atomic<GemmBackend>& backend() {
  static std::atomic<GemmBackend> b = initial_backend();
  return b;
}

Bf16Products initial_products() {
  const char* s = std::getenv("SHERD_BF16");
  const std::string name = s ? s : "auto";
  for (auto p : {Bf16Products::kAuto, Bf16Products::kNative, Bf16Products::kConverted})
    if (name == name_of(p)) return p;
  fail("SHERD_BF16 is \"", name, "\"; it can be auto, native or converted");
}

struct Rates {
  double native = 0, converted = 0;  // GFLOP/s
};
struct Products {
  std::atomic<Bf16Products> choice = initial_products();
  std::mutex mutex;  // of what follows
  Rates rates;       // zero: not measured
};
Products& products() {
  static Products p;
  return p;
}

// 512 x 512 x 512 on one thread, the best of three after one that warms up. By the thread's own
// processor time, so that other processes on the machine do not decide.
Rates measure() {
  constexpr int64_t n = 512;
  const OneThread guard;
  const Tensor x = full({n, n}, 0.5, kBFloat16),
               w = full({n, n}, 0.25, kBFloat16).as_strided_raw({n, n}, {1, n}, 0),
               y = empty({n, n}, kBFloat16);
  auto seconds = [] {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
  };
  auto gflops = [&](auto product) {
    double best = 1e30;
    for (int i = 0; i < 4; ++i) {
      const double start = seconds();
      product(x, w, y);
      if (i > 0) best = std::min(best, seconds() - start);
    }
    return 2e-9 * n * n * n / best;
  };
  return {gflops(cpu::native_bf16_product), gflops(cpu::converted_bf16_product)};
}

// "GenuineIntel 6 143 8 Intel(R) Xeon(R) ...": what /proc/cpuinfo says of the first processor.
std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  std::string line, vendor, family, model, stepping, name, bf16;
  while (std::getline(file, line) && !line.empty()) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    const std::string key = line.substr(0, line.find_last_not_of("\t ", colon - 1) + 1),
                      value = line.substr(colon + 2);
    if (key == "vendor_id") vendor = value;
    if (key == "cpu family") family = value;
    if (key == "model") model = value;
    if (key == "stepping") stepping = value;
    if (key == "model name") name = value;
    if (key == "flags")
      for (const char* flag : {"avx512_bf16", "amx_bf16"})
        if (value.find(flag) != std::string::npos) bf16 += std::string(" ") + flag;
  }
  return vendor + " " + family + " " + model + " " + stepping + bf16 + " " + name;
}
std::filesystem::path cache_file() {
  const char *xdg = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (xdg && *xdg == '/') return std::filesystem::path(xdg) / "sherd" / "bf16_products.txt";
  if (home && *home) return std::filesystem::path(home) / ".cache" / "sherd" / "bf16_products.txt";
  return {};
}
bool read_rates(Rates& rates) {
  std::ifstream file(cache_file());
  const std::string key = processor();
  for (std::string line; std::getline(file, line);) {
    std::istringstream in(line);
    Rates r;
    std::string rest;
    if (in >> r.native >> r.converted && std::getline(in >> std::ws, rest) && rest == key &&
        r.native > 0 && r.converted > 0) {
      rates = r;
      return true;
    }
  }
  return false;
}
// A line at the end, in one write: ranks may do this at the same time, and readers take the first.
// Where it can't be kept, it is measured again next time.
void keep_rates(const Rates& rates) {
  const std::filesystem::path path = cache_file();
  if (path.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(path.parent_path(), ignored);
  if (std::FILE* f = std::fopen(path.c_str(), "a")) {
    std::fprintf(f, "%.1f %.1f %s\n", rates.native, rates.converted, processor().c_str());
    std::fclose(f);
  }
}

Bf16Products resolve() {
  Products& p = products();
  std::lock_guard lock(p.mutex);
  if (p.choice != Bf16Products::kAuto) return p.choice;
  if (!cpu::onednn_has_bf16() || gemm_backend() == GemmBackend::kEigen)
    return p.choice = Bf16Products::kConverted;
  if (!read_rates(p.rates)) {
    p.rates = measure();
    keep_rates(p.rates);
    // Of ranks that measure at the same time, the first to write decides for all runs to come: so
    // for this one too, or it would differ from them in its bits.
    read_rates(p.rates);
  }
  return p.choice =
             p.rates.native > p.rates.converted ? Bf16Products::kNative : Bf16Products::kConverted;
}

}  // namespace

GemmBackend gemm_backend() { return backend().load(std::memory_order_relaxed); }
void set_gemm_backend(GemmBackend b) { backend() = b; }

const char* name_of(Bf16Products p) {
  return p == Bf16Products::kAuto ? "auto" : p == Bf16Products::kNative ? "native" : "converted";
}
Bf16Products bf16_products() {
  const Bf16Products p = products().choice.load(std::memory_order_relaxed);
  return p == Bf16Products::kAuto ? resolve() : p;
}
bool has_native_bf16_products() { return cpu::onednn_has_bf16(); }
void set_bf16_products(Bf16Products choice) {
  if (choice == Bf16Products::kNative && !cpu::onednn_has_bf16())
    fail("[set_bf16_products] this processor has no native bfloat16 products (oneDNN needs ",
         "AVX-512); choose auto or converted");
  std::lock_guard lock(products().mutex);
  products().choice = choice;
}
std::string describe_bf16_products() {
  const char* choice = name_of(bf16_products());
  std::lock_guard lock(products().mutex);
  const Rates r = products().rates;
  if (!r.native)
    return concat(choice, " bf16 products (",
                  cpu::onednn_has_bf16() ? "set" : "this processor has no native ones", ")");
  return concat("native bf16: ", int(r.native + 0.5),
                " GFLOP/s, converted: ", int(r.converted + 0.5), " GFLOP/s on one thread (", choice,
                " is used)");
}

}  // namespace sherd
