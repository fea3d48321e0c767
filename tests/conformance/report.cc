#include "tests/conformance/report.h"

#include <cmath>
#include <cstdio>
#include <regex>

#include "autograd/engine.h"

namespace sherd::test {
namespace {

// Differences on purpose: which ops, what was found (regular expressions for all of it), and why.
struct Excuse {
  std::string name, problem, reason;
};
const std::vector<Excuse>& excuses() {
  static const std::vector<Excuse> all{
      {"eq|ne|lt|gt|le|ge|logical_(and|or)|maximum|minimum|pow", "was not refused: ",
       "a number in C++ is a 0-d tensor, so it may stand on either side or on both"},
  };
  return all;
}
const Excuse* excuse_for(const std::string& name, const std::string& problem) {
  for (auto& e : excuses())
    if (std::regex_match(name, std::regex(e.name)) &&
        std::regex_match(problem, std::regex(e.problem)))
      return &e;
  return nullptr;
}

struct Tolerance {
  double relative, absolute;
};
// PyTorch's own.
Tolerance tolerance(DType d) {
  switch (d) {
    case kFloat64:
      return {1e-7, 1e-7};
    case kFloat32:
      return {1.3e-6, 1e-5};
    case kBFloat16:
      return {1.6e-2, 1e-5};
    case kFloat16:
      return {1e-3, 1e-5};
    default:
      return {0, 0};
  }
}

std::vector<double> doubles(const Tensor& t) {
  const Tensor c = contiguous_raw(to_raw(t.detach(), kFloat64));
  return {c.data<double>(), c.data<double>() + c.numel()};
}

// The largest |got - want| in units of the tolerance; infinite where one is NaN or another
// infinity.
double error(const std::vector<double>& got, const std::vector<double>& want, DType d,
             size_t* where = nullptr) {
  const auto [relative, absolute] = tolerance(d);
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double x = got[i], y = want[i];
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    const double e = std::isfinite(x - y) && absolute > 0
                         ? std::abs(x - y) / (absolute + relative * std::abs(y))
                         : INFINITY;
    if (e > worst) {
      worst = e;
      if (where) *where = i;
    }
  }
  return worst;
}

// Outputs, and where gradients are recorded, those by the fused and by the composed backward.
struct Results {
  std::vector<Tensor> tensors;
  std::vector<std::string> names;
  std::string problem;
};

Results results_of(const Outputs& outputs, const Json& test, const Decoder& decoder) {
  Results r;
  for (size_t k = 0; k < outputs.size(); ++k)
    r.tensors.push_back(outputs[k]), r.names.push_back(concat("output ", k));
  if (!test.contains("grads") || test["grads"].empty()) return r;
  std::vector<Tensor> roots, cotangents, leaves;
  for (size_t k = 0; k < outputs.size(); ++k) {
    const Json& c = test["cotangents"][k];
    if (c.is_null()) continue;
    const Dims& sizes = outputs[k].sizes();
    if (!outputs[k].requires_grad()) {
      r.problem = concat("output ", k, " does not require a gradient");
      return r;
    }
    roots.push_back(outputs[k]);
    cotangents.push_back(decoder.buffer(c).as_strided_raw(sizes, contiguous_strides(sizes), 0));
  }
  for (auto& g : test["grads"]) leaves.push_back(decoder.leaves.at(g["arg"]));
  for (bool graph : {false, true}) {
    auto grads = grad(roots, leaves, cotangents,
                      {.retain_graph = true, .create_graph = graph, .allow_unused = true});
    for (size_t i = 0; i < grads.size(); ++i) {
      const std::string path = test["grads"][i]["arg"];
      r.tensors.push_back(grads[i]);
      r.names.push_back((graph ? "composed gradient of " : "gradient of ") + path);
      if (!grads[i].defined() && r.problem.empty()) r.problem = r.names.back() + " is missing";
    }
  }
  return r;
}

struct Verdict {
  std::string problem, excuse;
};

Verdict judge(const Json& test, const Tensors& buffers,
              const std::function<Outputs(Decoder&)>& call) {
  Decoder decoder{buffers};
  const Outputs outputs = call(decoder);
  if (test.contains("error")) return {"was not refused: " + test["message"].get<std::string>(), ""};
  const Json& wanted = test["outputs"];
  if (outputs.size() != wanted.size())
    return {concat(outputs.size(), " outputs, expected ", wanted.size()), ""};
  const Results got = results_of(outputs, test, decoder);
  if (!got.problem.empty()) return {got.problem, ""};

  std::optional<Results> exact;
  Verdict verdict;
  for (size_t i = 0; i < got.tensors.size(); ++i) {
    const Json& json =
        i < wanted.size() ? wanted[i] : test["grads"][(i - wanted.size()) % test["grads"].size()];
    const Tensor &g = got.tensors[i], w = decoder.recorded(json);
    if (!(g.sizes() == w.sizes()))
      return {concat(got.names[i], ": shape ", g.sizes(), ", expected ", w.sizes()), ""};
    if (g.dtype() != w.dtype())
      return {concat(got.names[i], ": dtype ", g.dtype(), ", expected ", w.dtype()), ""};
    // Composed forms round between ops: in 16 bits only outputs are compared.
    if (i >= wanted.size() && size_of(w.dtype()) < 4) continue;
    const std::vector<double> x = doubles(g), y = doubles(w);
    size_t where = 0;
    if (error(x, y, w.dtype(), &where) <= 1) continue;
    char text[200];
    std::snprintf(text, sizeof text, "%s: element %zu is %.10g, expected %.10g",
                  got.names[i].c_str(), where, x[where], y[where]);
    if (!is_float(w.dtype()) || w.dtype() == kFloat64) return {text, ""};
    if (!exact) {
      Decoder wide{buffers, {}, true};
      exact = results_of(call(wide), test, wide);
    }
    const std::vector<double> z = doubles(exact->tensors[i]);
    // Which of two roundings comes nearer is luck, within a small factor.
    if (error(x, z, w.dtype()) > std::max(1.0, 4 * error(y, z, w.dtype()))) return {text, ""};
    verdict = {text, "rounding: about as near to the result in float64 as PyTorch's"};
  }
  return verdict;
}

}  // namespace

void Report::run(const std::string& name, const Json& test, const Tensors& buffers,
                 const std::function<Outputs(Decoder&)>& call) {
  Count& c = counts_[name];
  const std::string id = test["id"];
  const bool must_fail = test.contains("error");
  Verdict v;
  try {
    try {
      v = judge(test, buffers, call);
      if (const Excuse* e = excuse_for(name, v.problem)) v.excuse = e->reason;
    } catch (const WrongType&) {
      if (!must_fail) throw;
      ++c.refused;
      return;
    } catch (const Error& e) {
      if (must_fail) {
        ++c.refused;
        return;
      }
      v = {std::string("threw ") + e.what(), ""};
    }
  } catch (const Unsupported& u) {
    ++c.unsupported;
    if (verbose_) std::printf("unsupported %s: %s\n", id.c_str(), u.what());
    return;
  }
  if (v.problem.empty()) {
    ++c.passed;
  } else if (!v.excuse.empty()) {
    ++c.excused;
    if (verbose_)
      std::printf("excused %s: %s (%s)\n", id.c_str(), v.problem.c_str(), v.excuse.c_str());
  } else {
    ++c.failed;
    if (c.first.empty()) c.first = id + ": " + v.problem;
    if (verbose_) std::printf("FAILED %s: %s\n", id.c_str(), v.problem.c_str());
  }
}

int Report::print() const {
  Count all;
  for (auto& [name, c] : counts_) {
    std::printf("%-46s passed %4d  refused %3d  failed %3d  excused %3d  unsupported %3d  %s\n",
                name.c_str(), c.passed, c.refused, c.failed, c.excused, c.unsupported,
                c.first.c_str());
    all.passed += c.passed, all.refused += c.refused, all.failed += c.failed;
    all.excused += c.excused, all.unsupported += c.unsupported;
  }
  std::printf("%-46s passed %4d  refused %3d  failed %3d  excused %3d  unsupported %3d\n", "all",
              all.passed, all.refused, all.failed, all.excused, all.unsupported);
  return all.failed;
}

}  // namespace sherd::test
