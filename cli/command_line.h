// How all programs here read their command lines, with CLI11.
//
//     int main(int argc, char** argv) {
//       CLI::App app{"Counts."};
//       int64_t steps = 10;
//       app.add_option("--steps", steps)->transform(cli::whole_number(0));
//       if (auto code = cli::parse(app, "count", argc, argv)) return *code;
//       ...
//       return cli::finish("count", 0);
//     }
//
// Beyond what CLI11 does: "--flag=" gives an empty value, and does not take the next word for it;
// of a flag that comes twice the last counts, and the others are not even looked at; --help wins
// over mistakes beside it; a number out of range is refused, not clamped; a mistake is one line.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace sherd::cli {

// Ready for a program to return: 0 after --help (1 if it could not be printed), 2 after a mistake.
// Nothing: go on. From here on a write beyond the limit of a file's size (ulimit -f) is an error
// with a reason, not a signal that kills.
std::optional<int> parse(CLI::App& app, const std::string& program, int argc, char** argv);
// The same, and what was wrong is thrown: CLI::ParseError, CLI::CallForHelp.
void parse(CLI::App& app, int argc, char** argv);

// Decimal, with zeros in front or not: for transform(). most: 2^40, so that sums and products of
// two stay whole.
CLI::Validator whole_number(int64_t least, int64_t most = int64_t(1) << 40);
// The same without CLI11. Returns what is wrong; empty: n holds the number.
std::string read_whole_number(std::string_view text, int64_t least, int64_t most, int64_t& n);
// For check().
CLI::Validator number(double least = 0, double below = std::numeric_limits<double>::infinity());

// Prints the mistake as one line on stderr. Returns 2.
int refuse(const std::string& program, std::string mistake);
// What main returns: `code`, or 1 with a line on stderr if stdout did not take all that was
// printed.
int finish(const std::string& program, int code);

}  // namespace sherd::cli
