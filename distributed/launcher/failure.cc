#include "distributed/launcher/failure.h"

#include <signal.h>
#include <string.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>

#include "core/error.h"

namespace sherd::dist {
namespace {

// Whether the error blames another of the failed ranks: "rank 1 left the group".
bool names_other(const RankEnd& end, const std::set<int>& failed) {
  const std::string& text = end.error;
  const std::string word = "rank ";
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    size_t digit = at + word.size();
    int rank = 0;
    size_t digits = 0;
    for (;
         digit < text.size() && std::isdigit(static_cast<unsigned char>(text[digit])) && digits < 8;
         ++digit, ++digits) {
      rank = rank * 10 + (text[digit] - '0');
    }
    if (digits > 0 && rank != end.rank && failed.contains(rank)) return true;
  }
  return false;
}

// An uncaught exception or a failed assertion ends in SIGABRT: a report of its own, as an exit
// code.
bool was_struck_down(const RankEnd& end) { return end.signal != 0 && end.signal != SIGABRT; }

std::string describe_place(const RankEnd& end, const std::string& host) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.1f", end.seconds);
  std::string text = concat("pid ", end.pid, " on ", host, ", local rank ", end.local_rank, ", ",
                            seconds, " s after the start");
  // torchrun's notation, which its users look for.
  if (end.signal != 0) text += concat(", exit code -", end.signal);
  return text;
}

}  // namespace

std::vector<RankEnd> failures_by_cause(std::vector<RankEnd> ends) {
  std::erase_if(ends, [](const RankEnd& end) { return !end.failed(); });
  std::set<int> failed;
  for (const RankEnd& end : ends) failed.insert(end.rank);
  std::stable_sort(ends.begin(), ends.end(), [&](const RankEnd& a, const RankEnd& b) {
    return std::tuple(!was_struck_down(a), names_other(a, failed)) <
           std::tuple(!was_struck_down(b), names_other(b, failed));
  });
  return ends;
}

std::string describe(const RankEnd& end, const std::string& host) {
  std::string text = concat("rank ", end.rank, ": ");
  text += end.signal != 0 ? "killed by " + signal_name(end.signal)
                          : concat("exit code ", end.exit_code);
  if (!end.error.empty()) text += ": " + end.error;
  return text + "\n    " + describe_place(end, host);
}

std::string describe_all(const std::vector<RankEnd>& ends,
                         const std::function<std::string(const RankEnd&)>& host_of) {
  constexpr size_t kMost = 8;
  std::vector<std::string> texts;
  std::map<std::tuple<int, int, std::string>, size_t> known;  // ends, and where they stand in texts
  for (size_t i = 0; i < std::min(ends.size(), kMost); ++i) {
    const RankEnd& end = ends[i];
    const auto [at, is_new] =
        known.try_emplace({end.signal, end.exit_code, end.error}, texts.size());
    if (is_new)
      texts.push_back(describe(end, host_of(end)) +
                      (i == 0 && !end.log.empty() ? "\n    log: " + end.log : ""));
    else
      texts[at->second] +=
          concat("\n    rank ", end.rank, " likewise: ", describe_place(end, host_of(end)));
  }
  if (ends.size() > kMost)
    texts.push_back(concat("and ", ends.size() - kMost, " more failed ranks"));
  std::string text;
  for (const std::string& t : texts) text += (text.empty() ? "" : "\n") + t;
  return text;
}

int launcher_exit_code(const RankEnd& cause) {
  if (cause.signal != 0) return 128 + cause.signal;
  return cause.exit_code <= 125 ? cause.exit_code : 1;
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name ? std::string("SIG") + name : concat("signal ", signal);
}

}  // namespace sherd::dist
