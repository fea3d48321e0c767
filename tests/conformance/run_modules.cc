// run_modules FOLDER [--verbose]: the cases of a folder made by export_modules.py. Exit code 1 if
// any fails.
#include <cstdio>
#include <cstring>

#include "tests/conformance/report.h"

int main(int argc, char** argv) try {
  if (argc < 2 || argc > 3 || (argc == 3 && std::strcmp(argv[2], "--verbose") != 0)) {
    std::fprintf(stderr, "usage: run_modules FOLDER [--verbose]\n");
    return 2;
  }
  sherd::test::Report report(argc == 3);
  sherd::test::run_modules(argv[1], report);
  return report.print() != 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 2;
}
