#include "nn/print.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

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
  if (!lines.empty() || own.find('\n') != own.npos)
    inside = (own.empty() ? "" : "\n  " + indented(own)) + lines + "\n";
  return short_name(module.type_name()) + "(" + inside + ")";
}

std::string repr(double number) {
  char text[40];
  int digits = 0;  // after the first one: as few as give the number back
  do std::snprintf(text, sizeof text, "%.*e", digits, number);
  while (std::strtod(text, nullptr) != number && ++digits < 17);
  const char* exponent_at = std::strchr(text, 'e');
  if (!exponent_at) return text;  // inf, nan
  const int exponent = std::atoi(exponent_at + 1);
  if (exponent < -4 || exponent >= 16) return text;
  std::snprintf(text, sizeof text, "%.*f", std::max(1, digits - exponent), number);
  return text;
}

}  // namespace sherd::nn
