// Texts of errors in tests:
//
//     EXPECT_HAS(error_of([&] { all_reduce(x); }), "rank 1 left");
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/error.h"

namespace sherd {

// What `f` throws; "no error" if it throws none.
inline std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#define EXPECT_HAS(text, part) \
  EXPECT_TRUE(::sherd::has(text, part)) << "'" << (part) << "' in: " << (text)

}  // namespace sherd
