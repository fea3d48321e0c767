// Text to train a language model on: files, folders, or the English text that a Debian package
// brings.
//
//     std::string text = paths.empty() ? data::bible_text() : data::read_text(paths);
//     auto [train, validation] = data::hold_out(text);          // 95% and 5%
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd::data {

// The files that read_text would read, in its order: `path` itself if it is a file, else those in
// the folder and below, sorted by path. In folders it leaves out hidden files and folders, and
// files that are empty or don't look like text (is_text). Error if there is none.
std::vector<std::string> text_files(const std::string& path);

// The text of files and folders, one after another; a newline ends each file. Error if a path is
// missing, if a named file is empty or no text.
std::string read_text(const std::vector<std::string>& paths);

// The first 64 KiB hold no NUL and next to no other control characters. Any encoding passes.
bool is_text(std::string_view bytes);

// The King James Bible (4.1 MB): a verse a line without its number, an empty line after a chapter.
// From the program `bible` of Debian's package bible-kjv; Error that says so if it is missing.
std::string bible_text(const std::string& program = "bible");

// The first 1 - fraction of the text, and the rest, cut at a line break nearby; where there is none
// within half of the held-out part, at a space, or else between two characters.
std::pair<std::string_view, std::string_view> hold_out(std::string_view text,
                                                       double fraction = 0.05);

}  // namespace sherd::data
