// What the tests of nn share.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "nn/module.h"
#include "tests/core/support.h"

namespace sherd::test {

// The Error's text; a failure where f() throws none.
template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return "";
}
template <class F>
void expect_error(F f, std::initializer_list<const char*> parts) {
  const std::string text = error_of(f);
  for (auto* part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

inline std::vector<std::string> names_of(const nn::Module::NamedTensors& tensors) {
  std::vector<std::string> names;
  for (auto& [name, t] : tensors) names.push_back(name);
  return names;
}

}  // namespace sherd::test
