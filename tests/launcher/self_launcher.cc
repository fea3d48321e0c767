// A program that starts its own ranks: `self_launcher NPROC COMMAND`, where each rank is then `sh
// -c COMMAND`.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "distributed/launcher/launcher.h"

int main(int argc, char** argv) {
  if (argc != 3) return 99;
  if (const auto code = sherd::dist::launch_self(std::atoi(argv[1]), argc, argv)) {
    std::printf("launched: %d\n", *code);
    return *code;
  }
  execlp("sh", "sh", "-c", argv[2], nullptr);
  return 98;
}
