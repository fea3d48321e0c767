#include "nn/print.h"

#include <cstdio>
#include <cstdlib>

namespace sherd::nn {
namespace {

// "Linear" of "sherd::nn::Linear", "ModuleList" of "sherd::nn::ModuleList<Block>".
std::string short_name(const std::string& type) {
  size_t begin = 0, end = type.size();
  int depth = 0;
  for (size_t i = 0; i < type.size(); ++i) {
    if (type[i] == '<' || type[i] == '(') {
      if (depth++ == 0 && type[i] == '<') end = i;
    } else if (type[i] == '>' || type[i] == ')') {
      --depth;
    } else if (depth == 0 && type[i] == ':') {
      begin = i + 1, end = type.size();
    }
  }
  return type.substr(begin, end - begin);
}

std::string indented(const std::string& text) {
  std::string result;
  for (char c : text) {
    result += c;
    if (c == '\n') result += "  ";
  }
  return result;
}

}  // namespace

std::string to_string(const Module& module) {
  const auto children = module.named_children();
  std::string lines;
  for (size_t i = 0, next; i < children.size(); i = next) {
    const std::string text = to_string(*children[i].second);
    next = i + 1;
    while (module.is_container() && next < children.size() &&
           to_string(*children[next].second) == text)
      ++next;
    std::string name = children[i].first, count;
    if (next > i + 1)
      name += "-" + children[next - 1].first, count = std::to_string(next - i) + " x ";
    lines += "\n  (" + name + "): " + count + indented(text);
  }
  const std::string own = module.extra_repr();
  std::string inside = own;
  if (!lines.empty()) inside = (own.empty() ? "" : "\n  " + indented(own)) + lines + "\n";
  return short_name(module.type_name()) + "(" + inside + ")";
}

std::string repr(double number) {
  char text[32];
  for (int digits = 1; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, number);
    if (std::strtod(text, nullptr) == number) break;
  }
  const std::string result = text;
  return result.find_first_of(".en") == std::string::npos ? result + ".0" : result;
}

}  // namespace sherd::nn
