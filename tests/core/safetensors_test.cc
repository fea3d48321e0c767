#include "core/safetensors.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

namespace sherd {
namespace {

namespace fs = std::filesystem;
using Entry = SafetensorsWriter::Entry;

class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    const auto* t = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / concat("safetensors-", t->name(), "-", int(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override {
    fs::remove_all(folder_);
    close(memory_);
  }

  std::string path(const std::string& name = "x.safetensors") const { return folder_ / name; }
  // A file in memory with these bytes; the next one replaces it.
  std::string put(const std::string& bytes) const {
    EXPECT_EQ(ftruncate(memory_, 0), 0);
    EXPECT_EQ(pwrite(memory_, bytes.data(), bytes.size(), 0), ssize_t(bytes.size()));
    return concat("/proc/self/fd/", memory_);
  }
  // A file with this header and so many bytes of data.
  std::string put(const std::string& header, size_t data) const {
    const uint64_t n = header.size();
    std::string bytes(8, 0);
    std::memcpy(bytes.data(), &n, 8);
    return put(bytes + header + std::string(data, 'x'));
  }
  // The error of opening the file, which must name it.
  std::string error_of(const std::string& file) const {
    try {
      SafetensorsReader reader(file);
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(file), std::string::npos) << e.what();
      return e.what();
    }
    return "no error";
  }
  int files() const {
    return int(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
  int memory_ = memfd_create("safetensors", MFD_CLOEXEC);
};

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "got: " << (text)

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() &&
         (a.nbytes() == 0 || std::memcmp(a.bytes(), b.bytes(), size_t(a.nbytes())) == 0);
}

Tensor random_tensor(const Dims& sizes, DType dtype, std::mt19937& random) {
  Tensor t = empty(sizes, dtype);
  for (int64_t i = 0; i < t.nbytes(); ++i)
    t.bytes()[i] = char(dtype == kBool ? random() % 2 : random());
  return t;
}

// As make_goldens.py makes them.
std::map<std::string, Tensor> golden_tensors() {
  const Tensor values = tensor<float>(std::vector<float>{0, 1, 2, 3, 0, 5});
  const Tensor table = values.as_strided_raw({2, 3}, {3, 1}, 0);
  std::map<std::string, Tensor> t;
  for (int d = 0; d < kDTypes; ++d) t[concat("t_", name_of(DType(d)))] = to_raw(table, DType(d));
  t["scalar"] = full({}, 1.5);
  t["empty"] = zeros({0, 3});
  t["ünïcode \"quoted\"\n"] = tensor<float>({0, 1, 2});
  return t;
}
constexpr const char* kGolden = "tests/goldens/safetensors/all_dtypes.safetensors";

TEST_F(Safetensors, ReadsWhatPythonWrites) {
  const auto want = golden_tensors();
  const auto got = load_safetensors(kGolden);
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, t] : want) {
    ASSERT_TRUE(got.contains(name)) << name;
    EXPECT_TRUE(same_bytes(got.at(name), t)) << name;
  }
  EXPECT_EQ(SafetensorsReader(kGolden).metadata(), (SafetensorsMetadata{{"format", "pt"}}));
}

TEST_F(Safetensors, WritesTheSameBytesAsPython) {
  const FileSummary s = save_safetensors(path(), golden_tensors(), {{"format", "pt"}});
  EXPECT_EQ(read_file(path()), read_file(kGolden));
  EXPECT_EQ(s, summarize_file(path()));
  EXPECT_EQ(files(), 1) << "no temporary file is left";
}

TEST_F(Safetensors, RoundTripOfRandomTensors) {
  std::mt19937 random(1);
  for (int round = 0; round < 30; ++round) {
    std::map<std::string, Tensor> tensors;
    for (int i = random() % 12; i > 0; --i) {
      Dims shape;
      for (int d = random() % 5; d > 0; --d) shape.push(random() % 6);
      tensors[concat("t", random() % 1000, "\u00e9\x01\\")] =
          random_tensor(shape, DType(random() % kDTypes), random);
    }
    SafetensorsMetadata metadata;
    if (random() % 2) metadata = {{"a", "1"}, {"\"b\"", "x\ny"}};
    save_safetensors(path(), tensors, metadata);
    SafetensorsReader reader(path());
    EXPECT_EQ(reader.metadata(), metadata);
    ASSERT_EQ(reader.tensors().size(), tensors.size());
    for (const auto& [name, t] : tensors) EXPECT_TRUE(same_bytes(reader.read(name), t)) << name;
    uint64_t header = 0;
    std::memcpy(&header, read_file(path()).data(), 8);
    EXPECT_EQ(header % 8, 0) << "the data are aligned";
  }
}

TEST_F(Safetensors, StridedTensorsAreWrittenRowMajor) {
  const Tensor x =
      tensor<float>(std::span<const float>(std::vector<float>{1, 2, 3, 4, 5, 6}), {2, 3});
  const Tensor transposed = x.as_strided_raw({3, 2}, {1, 3}, 0);
  save_safetensors(path(), {{"t", transposed}});
  EXPECT_TRUE(same_bytes(load_safetensors(path()).at("t"), contiguous_raw(transposed)));
}

TEST_F(Safetensors, RangesOfATensor) {
  std::mt19937 random(2);
  const Tensor x = random_tensor({13, 7}, kInt32, random),
               y = random_tensor({5}, kBFloat16, random);
  save_safetensors(path(), {{"x", x}, {"y", y}});
  const SafetensorsReader reader(path());
  for (int round = 0; round < 50; ++round) {
    int64_t begin = random() % 92, end = random() % 92;
    if (begin > end) std::swap(begin, end);
    std::vector<int32_t> got(size_t(end - begin) + 1, 42);
    reader.read_range("x", begin, end, got.data());
    EXPECT_EQ(std::memcmp(got.data(), x.data<int32_t>() + begin, size_t(end - begin) * 4), 0);
    EXPECT_EQ(got.back(), 42) << "wrote beyond the range";
  }
  char none;
  reader.read_range("y", 5, 5, &none);
  for (auto [begin, end] : {std::pair{-1, 2}, {3, 2}, {0, 6}, {6, 6}})
    EXPECT_THROW(reader.read_range("y", begin, end, &none), Error) << begin << " " << end;
  EXPECT_THROW(reader.read("z"), Error);
  EXPECT_THROW(reader.info(""), Error);
}

TEST_F(Safetensors, OneReaderInSeveralThreads) {
  std::mt19937 random(3);
  std::map<std::string, Tensor> tensors;
  for (int i = 0; i < 8; ++i) tensors[concat("t", i)] = random_tensor({4000}, kFloat32, random);
  save_safetensors(path(), tensors);
  const SafetensorsReader reader(path());
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&, name = concat("t", i)] {
      for (int k = 0; k < 20; ++k) EXPECT_TRUE(same_bytes(reader.read(name), tensors.at(name)));
    });
  for (auto& t : threads) t.join();
}

TEST_F(Safetensors, StreamingInParts) {
  std::mt19937 random(4);
  const Tensor a = random_tensor({6, 5}, kFloat32, random), b = random_tensor({3}, kInt64, random);
  {
    SafetensorsWriter writer(path(),
                             {{"a", kFloat32, {6, 5}}, {"none", kBool, {0}}, {"b", kInt64, {3}}});
    writer.append_bytes(a.bytes(), 50);
    writer.append_bytes(a.bytes() + 50, 0);
    writer.append_bytes(a.bytes() + 50, 70);
    writer.append_bytes(nullptr, 0);
    writer.append(b);
    EXPECT_FALSE(fs::exists(path())) << "not there before it is whole";
    writer.finish();
  }
  const auto got = load_safetensors(path());
  EXPECT_TRUE(same_bytes(got.at("a"), a));
  EXPECT_TRUE(same_bytes(got.at("b"), b));
  EXPECT_EQ(got.at("none").numel(), 0);
}

TEST_F(Safetensors, MistakesOfTheWriter) {
  const std::vector<Entry> entries = {{"a", kFloat32, {2}}, {"b", kFloat32, {2}}};
  const auto message = [&](auto f) {
    SafetensorsWriter writer(path(), entries);
    try {
      f(writer);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_HAS(message([](auto& w) { w.append(zeros({3})); }), "'a' should be float32 [2]");
  EXPECT_HAS(message([](auto& w) { w.append(zeros({2}, kInt64)); }), "got int64 [2]");
  EXPECT_HAS(message([](auto& w) { w.append(empty({2}, kFloat32, kMeta)); }), "on meta");
  EXPECT_HAS(message([](auto& w) { w.finish(); }), "0 of 2");
  EXPECT_HAS(message([](auto& w) {
               w.append(zeros({2}));
               w.finish();
             }),
             "the next is 'b'");
  EXPECT_HAS(message([](auto& w) {
               char bytes[16] = {};
               w.append_bytes(bytes, 4);
               w.append(zeros({2}));
             }),
             "'a' was begun by parts");
  EXPECT_HAS(message([](auto& w) {
               char bytes[16] = {};
               w.append_bytes(bytes, 9);
             }),
             "'a', which lacks 8");
  EXPECT_HAS(message([](auto& w) {
               for (int i = 0; i < 3; ++i) w.append(zeros({2}));
             }),
             "all 2 tensors");
  EXPECT_EQ(files(), 0) << "nothing is left of files that were not finished";

  const std::vector<Entry> twice = {{"a", kBool, {}}, {"a", kBool, {}}};
  EXPECT_THROW(SafetensorsWriter(path(), twice), Error);
  const std::vector<Entry> reserved = {{"__metadata__", kBool, {}}};
  EXPECT_THROW(SafetensorsWriter(path(), reserved), Error);
  const std::vector<Entry> not_utf8 = {{"\xff", kBool, {}}};
  EXPECT_THROW(SafetensorsWriter(path(), not_utf8), Error);
  const std::vector<Entry> negative = {{"a", kBool, {-1}}};
  EXPECT_THROW(SafetensorsWriter(path(), negative), Error);
  EXPECT_THROW(SafetensorsWriter(path("no/such/folder/x"), entries), Error);
  EXPECT_EQ(files(), 0);
}

TEST_F(Safetensors, AnEarlierFileStaysUntilTheNewOneIsWhole) {
  save_safetensors(path(), {{"a", full({2}, 1)}});
  {
    SafetensorsWriter writer(path(), {{"a", kFloat32, {2}}});
    writer.append(full({2}, 2));
    EXPECT_EQ(load_safetensors(path()).at("a").data<float>()[0], 1);
  }
  EXPECT_EQ(load_safetensors(path()).at("a").data<float>()[0], 1);
  save_safetensors(path(), {{"a", full({2}, 2)}});
  EXPECT_EQ(load_safetensors(path()).at("a").data<float>()[0], 2);
}

TEST_F(Safetensors, AFullDiskIsAnErrorAndLeavesTheEarlierFile) {
  save_safetensors(path(), {{"a", full({2}, 1)}});
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {10'000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(save_safetensors(path(), {{"a", zeros({100'000})}}), Error);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(load_safetensors(path()).at("a").data<float>()[0], 1);
  EXPECT_EQ(files(), 1);
}

TEST_F(Safetensors, LinksAreFollowedAndPipesRefused) {
  ASSERT_EQ(symlink("target", path("link").c_str()), 0);
  for (int i = 0; i < 2; ++i) save_safetensors(path("link"), {{"a", zeros({3})}});
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_TRUE(load_safetensors(path("target")).contains("a"));
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_HAS(error_of(path("pipe")), "not a regular file");
  EXPECT_THROW(read_file(path("pipe")), Error);
  ASSERT_EQ(symlink("loop", path("loop").c_str()), 0);
  for (const char* name : {"pipe", "loop"}) {
    EXPECT_THROW(save_safetensors(path(name), {{"a", zeros({3})}}), Error);
    EXPECT_FALSE(fs::is_regular_file(fs::symlink_status(path(name))));
  }
}

TEST_F(Safetensors, BrokenHeaders) {
  const std::string f32 = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(error_of(put("{" + f32 + "}", 8)), "no error");
  EXPECT_EQ(error_of(put("{" + f32 + "}   \n", 8)), "no error");
  EXPECT_EQ(error_of(put("{}", 0)), "no error");
  EXPECT_EQ(error_of(put(R"({"__metadata__":{"k":"v"}})", 0)), "no error");

  EXPECT_HAS(error_of(path("missing")), "No such file");
  EXPECT_HAS(error_of(folder_), "not a regular file");
  EXPECT_HAS(error_of(put("")), "too few");
  EXPECT_HAS(error_of(put("1234567")), "too few");
  EXPECT_HAS(error_of(put(std::string(8, '\xff'))), "limit");
  EXPECT_HAS(error_of(put(std::string("\x10\0\0\0\0\0\0\0{}", 10))), "cut short");
  EXPECT_HAS(error_of(put("", 0)), "begin with '{'");
  EXPECT_HAS(error_of(put(" {}", 0)), "begin with '{'");
  EXPECT_HAS(error_of(put("[]", 0)), "begin with '{'");
  EXPECT_HAS(error_of(put("{", 0)), "not valid JSON");
  EXPECT_HAS(error_of(put("{}{}", 0)), "not valid JSON");
  EXPECT_HAS(error_of(put("{\"\xff\":1}", 0)), "not valid JSON");
  EXPECT_HAS(error_of(put("{" + f32 + "," + f32 + "}", 8)), "'a' twice");
  EXPECT_HAS(
      error_of(put(R"({"a":{"dtype":"F32","dtype":"F64","shape":[1],"data_offsets":[0,8]}})", 8)),
      "'dtype' twice");
  EXPECT_HAS(error_of(put(R"({"__metadata__":3})", 0)), "__metadata__");
  EXPECT_HAS(error_of(put(R"({"__metadata__":{"k":3}})", 0)), "'k' is not a string");
  EXPECT_HAS(error_of(put("{\"a\":" + std::string(100'000, '['), 0)), "nested too deeply");
  for (const char* value : {"3", "null", "{}", R"({"dtype":"F32","shape":[2]})"})
    EXPECT_HAS(error_of(put(concat("{\"a\":", value, "}"), 8)), "'a' needs");
  const auto with = [&](const char* dtype, const char* shape, const char* offsets, size_t data) {
    return error_of(put(concat(R"({"a":{"dtype":)", dtype, R"(,"shape":)", shape,
                               R"(,"data_offsets":)", offsets, "}}"),
                        data));
  };
  EXPECT_EQ(with("\"F32\"", "[]", "[0,4]", 4), "no error");
  EXPECT_HAS(with("3", "[]", "[0,4]", 4), "must be");
  EXPECT_HAS(with("\"F32\"", "4", "[0,4]", 4), "must be");
  EXPECT_HAS(with("\"F32\"", "[]", "[0,4,4]", 4), "must be");
  EXPECT_HAS(with("\"F32\"", "[]", "4", 4), "must be");
  EXPECT_HAS(with("\"F8_E4M3\"", "[4]", "[0,4]", 4), "dtype F8_E4M3");
  EXPECT_HAS(with("\"F32\"", "[-1]", "[0,4]", 4), "whole numbers");
  EXPECT_HAS(with("\"F32\"", "[1.0]", "[0,4]", 4), "whole numbers");
  EXPECT_HAS(with("\"F32\"", "[\"1\"]", "[0,4]", 4), "whole numbers");
  EXPECT_HAS(with("\"F32\"", "[18446744073709551615]", "[0,4]", 4), "whole numbers");
  EXPECT_HAS(with("\"F32\"", "[1]", "[-4,0]", 4), "whole numbers");
  EXPECT_HAS(with("\"F32\"", "[1,1,1,1,1,1,1,1,1]", "[0,4]", 4), "9 dimensions");
  EXPECT_HAS(with("\"F32\"", "[4611686018427387904]", "[0,0]", 0), "too large");
  EXPECT_HAS(with("\"F32\"", "[4294967296,4294967296]", "[0,0]", 0), "too large");
  EXPECT_EQ(with("\"F32\"", "[4294967296,4294967296,0]", "[0,0]", 0), "no error");
  EXPECT_HAS(with("\"F32\"", "[3,3]", "[0,40]", 40), "takes 36 bytes");
  EXPECT_HAS(with("\"F32\"", "[1]", "[4,0]", 4), "takes 4 bytes");
}

TEST_F(Safetensors, BytesThatAreNotCoveredOnce) {
  const auto two = [&](const char* a, const char* b, size_t data) {
    return error_of(put(concat(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)", a,
                               R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)", b, "}}"),
                        data));
  };
  EXPECT_EQ(two("[0,4]", "[4,8]", 8), "no error");
  EXPECT_EQ(two("[4,8]", "[0,4]", 8), "no error");
  EXPECT_HAS(two("[0,4]", "[2,6]", 6), "'b' begins at byte 2, inside the one before");
  EXPECT_HAS(two("[0,4]", "[0,4]", 4), "inside the one before");
  EXPECT_HAS(two("[0,4]", "[5,9]", 9), "'b' begins at byte 5, but the one before it ends at 4");
  EXPECT_HAS(two("[1,5]", "[5,9]", 9), "'a' begins at byte 1");
  EXPECT_HAS(two("[0,4]", "[4,8]", 7),
             "cut short: tensor 'b' ends at byte 8 of the data, the file has 7");
  EXPECT_HAS(two("[0,4]", "[4,8]", 3), "cut short: tensor 'a'");
  EXPECT_HAS(two("[0,4]", "[4,8]", 9), "1 bytes after the last tensor");
}

TEST_F(Safetensors, CutShortAnywhere) {
  const std::string whole = read_file(kGolden);
  for (size_t n = 0; n < whole.size(); ++n)
    EXPECT_NE(error_of(put(whole.substr(0, n))), "no error") << n;
}

TEST_F(Safetensors, AFileThatBecomesShorterWhileItIsOpen) {
  save_safetensors(path(), {{"a", zeros({1000})}});
  const SafetensorsReader reader(path());
  fs::resize_file(path(), 2000);
  EXPECT_THROW(reader.read("a"), Error);
}

// Whatever the header says, the reader throws an Error or everything it announces can be read.
TEST_F(Safetensors, MutatedHeaders) {
  const std::string whole = read_file(kGolden);
  uint64_t length = 0;
  std::memcpy(&length, whole.data(), 8);
  std::mt19937 random(5);
  int accepted = 0;
  const std::string pieces[] = {"[",
                                "]",
                                "{",
                                "}",
                                ",",
                                "\"",
                                "0",
                                "9",
                                "-",
                                "1e9",
                                ":",
                                "\"F64\"",
                                "18446744073709551615",
                                "null",
                                " ",
                                "\xc3"};
  constexpr int kRounds = 1500;
  for (int round = 0; round < kRounds; ++round) {
    std::string header = whole.substr(8, length), data = whole.substr(8 + length);
    for (int k = 1 + random() % 3; k > 0; --k) {
      const size_t at = random() % header.size();
      switch (random() % 5) {
        case 0:
          header[at] = char(random());
          break;
        case 1:
          header.erase(at, 1 + random() % 4);
          break;
        case 2:
          header.insert(at, pieces[random() % std::size(pieces)]);
          break;
        case 3:  // a digit for another
          if (const size_t d = header.find_first_of("0123456789", at); d != std::string::npos)
            header[d] = char('0' + random() % 10);
          break;
        case 4:
          data.resize(random() % (data.size() + 20));
          break;
      }
    }
    uint64_t n = header.size();
    if (random() % 20 == 0) n = random() % 2 ? random() : n + random() % 9 - 4;
    std::string bytes(8, 0);
    std::memcpy(bytes.data(), &n, 8);
    try {
      const SafetensorsReader reader(put(bytes + header + data));
      for (const auto& info : reader.tensors()) {
        const Tensor t = reader.read(info.name);
        EXPECT_EQ(t.nbytes(), info.bytes);
      }
      ++accepted;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(accepted, kRounds / 50) << "the mutations are too wild to test anything";
  EXPECT_LT(accepted, kRounds / 2);
}

TEST_F(Safetensors, AtomicFileNamesWhatWentWrong) {
  try {
    AtomicFile file("/no/such/folder/x");
    FAIL();
  } catch (const Error& e) {
    EXPECT_HAS(std::string(e.what()), "/no/such/folder/x: No such file");
  }
  EXPECT_THROW(summarize_file(path("missing")), Error);
  EXPECT_THROW(read_file(path("missing")), Error);
  EXPECT_THROW(sync_folder(path("missing")), Error);
  AtomicFile file(path());
  file.write("abc", 3);
  EXPECT_EQ(file.commit(), (FileSummary{3, checksum_of("abc", 3)}));
  EXPECT_THROW(file.commit(), Error);
  EXPECT_EQ(read_file(path()), "abc");
  EXPECT_EQ(checksum_of("", 0), 0x2d06800538d394c2) << "XXH3's own test vector";
}

}  // namespace
}  // namespace sherd
